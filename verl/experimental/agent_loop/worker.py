"""`AgentLoopWorker`: the Ray actor that runs many agent loops at once on one event loop."""

from __future__ import annotations

import asyncio
import importlib
import itertools
import logging
from collections.abc import Collection, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ray.exceptions import RayError

from verl.checkpoint_engine.support.memory import in_words
from verl.experimental.agent_loop import kept_unfinished
from verl.experimental.agent_loop.attempts import Attempts, Call, calls_of
from verl.experimental.agent_loop.batching import to_batch
from verl.experimental.agent_loop.errors import AgentCodeError, AgentLoopError
from verl.experimental.agent_loop.kept_unfinished import KeptUnfinished
from verl.experimental.agent_loop.output import AgentLoopOutput
from verl.experimental.agent_loop.registry import LoopEntry, constructor_arguments, loop_factory
from verl.experimental.agent_loop.server_manager import COUNTS, Recording, ServerManager
from verl.experimental.agent_loop.tool_calls import SampleCalls, ToolCalls
from verl.protocol import DataProto
from verl.utils.config import ConfigError
from verl.utils.lifetime import begin_actor
from verl.utils.model import load_tokenizer
from verl.utils.pictures import MULTI_MODAL_DATA, SEEN, PictureProcessor, by_kind, media_in
from verl.utils.progress import Progress
from verl.utils.seeds import derived
from verl.utils.user_code import UserCodeError
from verl.workers.config import HFModelConfig, PPOConfig
from verl.workers.config.rollout import AgentConfig
from verl.workers.rollout.errors import RolloutError
from verl.workers.rollout.records import CallName, SamplingOptions, TokenOutput
from verl.workers.rollout.written_calls import CallDirectory

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


logger = logging.getLogger(__name__)

NO_PICTURES: Mapping[str, Any] = {"images": []}
TAKEN_WITHIN_S = 10.0
LINGERS_S = 1.0
"""How long a complete sample counts as under way: it is on its way into the file where it outlives its driver."""
MOST_KEPT_NBYTES = 2**29
"""Of complete batches, of one prompt each: the oldest ones go."""
OURS = (AgentLoopError, ConfigError, RayError, RolloutError)
"""Errors in a user's loop that are not errors of its code."""


@dataclass(eq=False)
class _Running:
    """A call of `generate_sequences`."""

    validate: bool
    total: int
    done: int = 0
    tokens: int = 0

    def finish(self, output: AgentLoopOutput) -> AgentLoopOutput:
        self.done += 1
        self.tokens += sum(output.response_mask)
        return output


class AgentLoopWorker:
    """Made by `AgentLoopManager`, one or more per job; the manager is its only caller."""

    def __init__(
        self,
        *,
        config: PPOConfig,
        servers: Sequence[Any],
        tokenizer_path: str,
        loops: Mapping[str, LoopEntry],
        rank: int,
        tool_calls: Path | None = None,
        pictures: PictureProcessor | None = None,
        takes_over: bool = False,
    ) -> None:
        """`loops` are the driver's known loops. `tool_calls`: a directory, if there are tools. `pictures`: of a
        model that sees. `takes_over`: a worker of this rank has died. Raises ConfigError for an unusable tokenizer."""
        begin_actor()
        if module := config.actor_rollout_ref.model.external_lib:  # it may register loops, and formats of tool calls
            importlib.import_module(module)
        self._config = config
        self._loops = loops
        self._rank = rank
        self._pictures = pictures
        self._tokenizer = tokenizer_for_chats(tokenizer_path, config.actor_rollout_ref.model)
        self._limit = asyncio.Semaphore(config.actor_rollout_ref.rollout.agent.max_concurrency)
        self._directory = _directory()
        self._servers = self._connect(servers)
        self._running: list[_Running] = []
        self._attempts = Attempts()
        self._under_way: dict[tuple[Hashable, ...], asyncio.Task[DataProto]] = {}
        """By their samples: batches for training, without seeds; also complete ones that are to be kept."""

        self._kept_nbytes: dict[tuple[Hashable, ...], int] = {}
        """Of complete ones, the oldest first."""
        self._is_over = False
        """Whether there was no room for one."""

        self._active: dict[Hashable, Recording] = {}
        """By name, samples that are not complete, or only just, of batches that another driver may ask for."""

        self._kept: KeptUnfinished | None = None
        self._tool_calls = ToolCalls(tool_calls and tool_calls / f"{rank}.calls", takes_over=takes_over)
        self._left_by: Sequence[Any] = servers if takes_over else ()
        """Servers that may keep calls of the worker that died."""

    async def ready(self) -> None:
        """Return once the constructor has returned, and it is known what a worker that died left: with servers, and of
        its tools' calls."""
        servers, self._left_by = self._left_by, ()
        kept = await asyncio.gather(*(_taken(server, self._name) for server in servers))
        for sample, calls in calls_of(itertools.chain(*kept)).items():
            self._attempts.leave(sample, calls)
        await self._tool_calls.opened()

    @property
    def _name(self) -> str:
        return f"agent-loop-worker-{self._rank}"

    async def set_servers(self, servers: Sequence[Any]) -> None:
        """Send requests to `servers` from now on, after a change of replicas."""
        self._servers = self._connect(servers)

    async def take_unfinished(self, directory: Path, run: str, up_to: int, uids: Collection[str]) -> int:
        """Go on with what the worker of this rank had of these prompts when its driver died, without tokens of versions
        after `up_to`: see `kept_unfinished.read`. Returns the number of tokens."""
        read = await asyncio.to_thread(kept_unfinished.read, directory, self._rank, run, up_to)
        found = {sample: calls for sample, calls in read.items() if _uid_in(sample) in uids}
        for sample, calls in found.items():
            self._attempts.leave(sample, calls)
        await self._tool_calls.resume()
        return sum(call.num_tokens for calls in found.values() for call in calls)

    def _unfinished(self) -> list[tuple[str, Call]]:
        calls = [(name, call) for name, one in self._active.items() for call in one.attempt.all_calls]
        return [(str(name), call) for name, call in (*calls, *self._attempts.calls())]

    async def progress(self, *, validate: bool) -> Progress | None:
        """The finished responses of this worker's batches for training or validation; None without a batch."""
        running = [batch for batch in self._running if batch.validate == validate]
        done, total, tokens = (sum(getattr(each, name) for each in running) for name in ("done", "total", "tokens"))
        return Progress(done, total, "answers", tokens) if running else None

    async def generate_sequences(self, samples: DataProto, first_index: int) -> DataProto:
        """Run the loop of every sample. The first failure cancels the rest, and is raised as AgentLoopError, or as
        AgentCodeError for an error of the user's code.

        `first_index` is the first sample's index in the whole batch. Returns a batch of `to_batch`, in the order of
        `samples`; `meta_info["metrics"]` has one value per sample, and sums for COUNTS.

        If a batch fails, a further call with samples of it, by uid, takes what they have: see `Attempts`. A call for a
        batch that is under way, because who asked for it died, waits for that. With `meta_info["keep"]` a complete one
        is kept for such a call, until `forget`. `meta_info["unfinished"]`, a directory and the name of the run, is
        where what is under way is kept for another driver.
        """
        if self._kept is None and (unfinished := samples.meta_info.get("unfinished")):
            self._kept = KeptUnfinished(Path(unfinished[0]), self._rank, unfinished[1], self._unfinished)
        names = _names(samples, first_index)
        if names is None or self._config.trainer.full_determinism:
            return await self._generate_sequences(samples, first_index)
        while (batch := self._under_way.get(names)) is not None and batch.cancelling():
            await asyncio.wait([batch])  # it leaves what it has
            self._drop(names, batch)
        if batch is None:
            batch = self._under_way[names] = asyncio.create_task(self._generate_sequences(samples, first_index))
        try:
            generated = await asyncio.shield(batch)
        except BaseException:
            await _ended([batch])
            self._drop(names, batch)
            raise
        if samples.meta_info.get("keep", False) and self._under_way.get(names) is batch:  # else it was forgotten
            self._keep_complete(names, generated)
        else:
            self._drop(names, batch)
        return generated

    def _keep_complete(self, names: tuple[Hashable, ...], generated: DataProto) -> None:
        self._kept_nbytes[names] = generated.nbytes
        while sum(self._kept_nbytes.values()) > MOST_KEPT_NBYTES:
            oldest = next(iter(self._kept_nbytes))
            self._drop(oldest, self._under_way[oldest])
            if not self._is_over:
                logger.warning(
                    "complete samples take over %s: if their rollouter dies, the oldest ones are generated again "
                    "(rollout.keep_tokens)",
                    in_words(MOST_KEPT_NBYTES),
                )
            self._is_over = True

    def _drop(self, names: tuple[Hashable, ...], batch: asyncio.Task[DataProto]) -> None:
        if self._under_way.get(names) is batch:
            del self._under_way[names]
            self._kept_nbytes.pop(names, None)

    async def forget(self, uids: Collection[str]) -> None:
        """Drop what is kept of prompts: nobody will ask for them again."""
        gone = frozenset(uids)
        for named in [named for named in self._under_way.items() if named[0][0] in gone]:
            self._drop(*named)
        await self._tool_calls.forget(gone)

    async def _generate_sequences(self, samples: DataProto, first_index: int) -> DataProto:
        validate = samples.meta_info["validate"]
        rollout = self._config.actor_rollout_ref.rollout
        make_sampling = SamplingOptions.for_validation if validate else SamplingOptions.for_training
        sampling = make_sampling(rollout, max_tokens=self._config.data.max_response_length)
        if samples.meta_info.get("greedy"):
            sampling = replace(sampling, temperature=0.0)
        running = _Running(validate, len(samples))
        step = samples.meta_info.get("global_steps", 0)

        async def run(
            row: dict[str, Any], index: int, servers: Recording, done: AgentLoopOutput | None, calls: SampleCalls
        ) -> AgentLoopOutput:
            return running.finish(done or await self._run_one(row, sampling, index, servers, calls))

        begun: dict[asyncio.Task[AgentLoopOutput], tuple[str, Recording]] = {}
        for index, row in enumerate(_rows(samples), first_index):
            name = repr((row.get("uid"), index, step, sampling))
            left = self._attempts.take(name)
            done, calls = (left, ()) if isinstance(left, AgentLoopOutput) else (None, left)
            known_as = None if validate or row.get("uid") is None else (self._name, name)
            servers = Recording(self._servers, row.get("uid"), self._seed(step, row, index), calls, known_as)
            servers.sample.taken_over = sum(done.response_mask) if done else 0
            if known_as is not None:
                self._active[name] = servers
            tool_calls = self._tool_calls.of(row.get("uid"), (validate, name))
            begun[asyncio.create_task(run(row, index, servers, done, tool_calls))] = name, servers
        self._running.append(running)
        try:
            outputs = await asyncio.gather(*begun)
        except BaseException:
            await _ended(begun)
            for task, (name, servers) in begun.items():
                if servers.may_be_repeated and not validate:  # of validation uids come again, with other weights
                    failed = task.cancelled() or task.exception() is not None
                    self._attempts.leave(name, servers.attempt.all_calls if failed else task.result())
            self._deactivate(begun.values())
            raise
        finally:
            self._running.remove(running)
            await _ended(begun)
        asyncio.get_running_loop().call_later(LINGERS_S, self._deactivate, list(begun.values()))
        self._tell_complete(begun.values())
        batch = to_batch(
            outputs,
            prompt_length=self._config.data.max_prompt_length,
            response_length=self._config.data.max_response_length,
            pad_token_id=int(self._tokenizer.pad_token_id),
            kv_versions=rollout.kv_across_versions != "clear",
        )
        if MULTI_MODAL_DATA in samples.non_tensor_batch or self._may_add_pictures(samples):
            seen = [list(output.seen) for output in outputs]
            pictures = [dict(output.multi_modal_data or NO_PICTURES) for output in outputs]
            batch.union(DataProto.from_dict(non_tensors={SEEN: seen, MULTI_MODAL_DATA: pictures}))
        batch.meta_info["metrics"] = {
            **_per_sample([output.numbers for output in outputs]),
            **{name: sum(getattr(servers.sample, name) for _, servers in begun.values()) for name in COUNTS},
        }
        return batch

    def _deactivate(self, samples: Iterable[tuple[str, Recording]]) -> None:
        for name, servers in samples:
            if self._active.get(name) is servers:
                del self._active[name]

    def _tell_complete(self, samples: Iterable[tuple[str, Recording]]) -> None:
        """Servers need not keep their calls any longer. Nobody waits for it."""
        kept: dict[Any, list[str]] = {}
        for name, servers in samples:
            for server in servers.sample.keepers:
                kept.setdefault(server, []).append(name)
        for server, names in kept.items():
            server.forget_calls.remote(self._name, names)

    def _may_add_pictures(self, samples: DataProto) -> bool:
        """Whether loops may show pictures to the policy that are not in the data. The same for all batches of one data
        set, which can then be joined."""
        alone = default_loop(self._config) == AgentConfig.default_agent_loop
        return self._pictures is not None and ("agent_name" in samples.non_tensor_batch or not alone)

    def _seed(self, step: int, row: Mapping[str, Any], index: int) -> int | None:
        """Of the sample at `index` of a batch; None if the engine draws."""
        trainer = self._config.trainer
        return derived(trainer.seed, step, row.get("uid"), index) if trainer.full_determinism else None

    async def _run_one(
        self, row: dict[str, Any], sampling: SamplingOptions, index: int, servers: Recording, tool_calls: SampleCalls
    ) -> AgentLoopOutput:
        name = row.get("agent_name") or default_loop(self._config)
        loop: Any = None
        async with self._limit:
            try:
                make_loop = loop_factory(name, self._loops)
                loop = make_loop(**constructor_arguments(self._config, servers, self._tokenizer))
                loop.pictures, loop.tool_calls = self._pictures, tool_calls
                output = await loop.run(sampling.as_dict(), **row)
                if isinstance(output, AgentLoopOutput):
                    output = self._with_pictures(output, row)
            except Exception as exc:
                error = AgentCodeError if _is_of_the_user(exc, loop) else AgentLoopError
                raise error(f"{_describe(row, index)}: agent loop {name!r} failed: {_told(exc)}") from exc
        if not isinstance(output, AgentLoopOutput):
            raise AgentCodeError(f"{_describe(row, index)}: agent loop {name!r} returned {type(output).__name__}")
        return replace(output.with_versions(servers.generated), seen=output.seen or servers.seen)

    def _with_pictures(self, output: AgentLoopOutput, row: Mapping[str, Any]) -> AgentLoopOutput:
        """With all its pictures. Raises AgentLoopError where the policy has written a token for pictures in front of
        one: trainers take the first ones for pictures."""
        if self._pictures is None:
            return output
        for token in self._pictures.token_ids.values():
            own = False
            for found, mine in zip(output.response_ids, output.response_mask, strict=True):
                if found == token and own and not mine:
                    raise AgentLoopError(
                        "a picture follows a token for pictures that the policy has written: end there"
                    )
                own = own or (found == token and bool(mine))
        of_data = row.get(MULTI_MODAL_DATA) or {}
        seen = by_kind(media_in(output.multi_modal_data or of_data), of_data)
        return replace(output, multi_modal_data=seen)

    def _connect(self, servers: Sequence[Any]) -> ServerManager:
        rollout = self._config.actor_rollout_ref.rollout
        return ServerManager(
            servers,
            timeout_s=rollout.generate_timeout_s,
            continue_aborted=rollout.agent.partial_rollout,
            first_server=self._rank,
            directory=self._directory,
        )


def _directory() -> CallDirectory | None:
    try:
        return CallDirectory()
    except OSError as exc:
        logger.warning("servers are asked for their tokens, as shared memory cannot be used: %s", exc)
        return None


async def _taken(server: Any, owner: str) -> list[tuple[CallName, TokenOutput]]:
    """What a server keeps for a worker that died; nothing if it does not answer."""
    try:
        async with asyncio.timeout(TAKEN_WITHIN_S):
            taken: list[tuple[CallName, TokenOutput]] = await server.take_calls.remote(owner)
    except (RayError, TimeoutError):
        return []
    return taken


async def _ended(tasks: Collection[asyncio.Task[Any]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


def _is_of_the_user(error: Exception, loop: Any) -> bool:
    """Whether code of the user's own failed, in `loop` or in what it calls; None: while it was made."""
    return isinstance(error, UserCodeError) or not (
        type(loop).__module__.startswith("verl.") or isinstance(error, OURS)
    )


def _told(error: Exception) -> str:
    says_all = isinstance(error, (UserCodeError, *OURS))
    return str(error) if says_all else f"{type(error).__name__}: {error}"


def default_loop(config: PPOConfig) -> str:
    """The loop of samples without `agent_name`."""
    rollout = config.actor_rollout_ref.rollout
    named = rollout.agent.default_agent_loop
    return "tool_agent" if rollout.multi_turn.enable and named == AgentConfig.default_agent_loop else named


def tokenizer_for_chats(path: str, model: HFModelConfig) -> PreTrainedTokenizerBase:
    """The tokenizer in `path`. Raises ConfigError if there is none, or if it has no chat template."""
    tokenizer = load_tokenizer(replace(model, tokenizer_path=path))
    if tokenizer.chat_template is None:
        raise ConfigError(
            f"the tokenizer in {path} has no chat template: set actor_rollout_ref.model.custom_chat_template"
        )
    return tokenizer


def _names(samples: DataProto, first_index: int) -> tuple[Hashable, ...] | None:
    """The uids, and what else no other batch for training has; None without uids, and for validation, where they come
    again."""
    uids = samples.non_tensor_batch.get("uid")
    if uids is None or samples.meta_info["validate"]:
        return None
    how = (samples.meta_info.get("greedy", False), samples.meta_info.get("global_steps", 0))
    return (*uids, first_index, *how)


def _uid_in(name: str) -> str:
    """Of a sample that `_generate_sequences` has named."""
    return name.split("'", 2)[1]


def _rows(samples: DataProto) -> list[dict[str, Any]]:
    columns = samples.non_tensor_batch
    return [{name: values[row] for name, values in columns.items()} for row in range(len(samples))]


def _describe(row: Mapping[str, Any], index: int) -> str:
    names = ", ".join(f"{key}={row[key]}" for key in ("index", "uid") if row.get(key) is not None)
    return f"sample {index}" + (f" ({names})" if names else "")


def _per_sample(metrics: Sequence[Mapping[str, float]]) -> dict[str, list[float]]:
    names = {name for one in metrics for name in one}
    return {name: [one[name] for one in metrics if name in one] for name in sorted(names)}
