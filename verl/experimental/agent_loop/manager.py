"""`AgentLoopManager`, on the driver: distributes samples to the workers and joins their results."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

import numpy as np
import ray
from ray.exceptions import RayActorError

from verl.experimental.agent_loop.errors import AgentLoopTimeout
from verl.experimental.agent_loop.interaction import interactions_of
from verl.experimental.agent_loop.interaction_check import unheard
from verl.experimental.agent_loop.registry import check_loop, known_loops, loop_class
from verl.experimental.agent_loop.server_manager import COUNTS
from verl.experimental.agent_loop.tool_files import load_tools
from verl.experimental.agent_loop.tool_parser import ToolParser
from verl.experimental.agent_loop.worker import AgentLoopWorker, default_loop
from verl.protocol import DataProto
from verl.single_controller.future import is_of_dead_actor
from verl.trainer.kept_samples import TOOL_CALLS
from verl.utils.builtin import SEEING_MODEL
from verl.utils.dataset.rl_dataset import Partners
from verl.utils.language_model import directory_sees
from verl.utils.model import load_hf_config, resolve_model_path
from verl.utils.pictures import PictureProcessor, load_processor
from verl.workers.config import HFModelConfig, PPOConfig

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

STARTED_AGAIN = 3
"""A replacement worker may die so often at its start, because Ray places it on a lost host until it notices the
loss."""

logger = logging.getLogger(__name__)


class AgentLoopManager:
    """Runs `agent.num_workers` worker actors. Used by one thread of the driver; `close` or `with` ends the actors."""

    def __init__(self, config: PPOConfig, server_handles: Sequence[Any], tokenizer_path: str | Path) -> None:
        """`tokenizer_path` is a local Hugging Face directory that every worker can read.

        Raises ConfigError, before any actor starts, for a loop or tool that cannot be loaded; AgentLoopTimeout if the
        workers do not start within `rollout.startup_timeout_s`.
        """
        self.check_config(config)
        self._config = config
        self._tokenizer_path = str(tokenizer_path)
        rollout = config.actor_rollout_ref.rollout
        self._loops = known_loops(rollout.agent.agent_loop_config_path)
        self._servers = list(server_handles)
        self._pictures = _picture_processor(config.actor_rollout_ref.model)
        self._tool_calls = (
            Path(config.trainer.output_dir).absolute() / TOOL_CALLS if rollout.multi_turn.tool_config_path else None
        )
        ranks = range(rollout.agent.num_workers)
        self._workers = [self._start(rank) for rank in ranks]
        self._failed: tuple[DataProto | None, dict[int, Any]] = None, {}
        """The batch that has not been generated as a whole, and by rank the references of what did not fail of it."""
        try:
            self._await_started(ranks)
        except BaseException:
            self.close()
            raise

    @staticmethod
    def check_config(config: PPOConfig) -> None:
        """Raise ConfigError for a loop or tool that cannot be loaded. Trainers call it before they start processes."""
        rollout = config.actor_rollout_ref.rollout
        check_loop(default_loop(config), known_loops(rollout.agent.agent_loop_config_path))
        ToolParser.parser_class(rollout.multi_turn.format)
        if rollout.multi_turn.tool_config_path is not None:
            load_tools(rollout.multi_turn.tool_config_path)
        interactions_of(config)

    @staticmethod
    def shown_tools(config: PPOConfig, agent_name: str | None) -> Sequence[Any]:
        """Schemas of the tools in the agent's prompts (None: the default agent). Trainers count tokens with them.
        Raises ConfigError for an unknown agent, and for a loop or tool that cannot be loaded."""
        loops = known_loops(config.actor_rollout_ref.rollout.agent.agent_loop_config_path)
        name = agent_name or default_loop(config)
        return check_loop(name, loops).shown_tools(config)

    @staticmethod
    def sees(config: PPOConfig, agent_name: str | None) -> bool:
        """Whether that agent shows the pictures of its samples to the policy. Trainers check it before they start."""
        loops = known_loops(config.actor_rollout_ref.rollout.agent.agent_loop_config_path)
        return bool(getattr(loop_class(agent_name or default_loop(config), loops), "sees", False))

    @staticmethod
    def rewards(config: PPOConfig, agent_name: str | None) -> bool:
        """Whether that agent rewards its samples itself. Trainers check before they start what rewards the others."""
        loops = known_loops(config.actor_rollout_ref.rollout.agent.agent_loop_config_path)
        return bool(getattr(loop_class(agent_name or default_loop(config), loops), "rewards", False))

    @staticmethod
    def check_tokenizer(config: PPOConfig, agent_name: str | None, tokenizer: PreTrainedTokenizerBase) -> None:
        """Raise ConfigError for a tokenizer, or a chat template, that this agent cannot use. Trainers call it once per
        agent of their samples."""
        loops = known_loops(config.actor_rollout_ref.rollout.agent.agent_loop_config_path)
        loop_class(agent_name or default_loop(config), loops).check_tokenizer(config, tokenizer)

    @staticmethod
    def unheard_interactions(config: PPOConfig, samples: Mapping[str | None, Partners]) -> list[str]:
        """Warnings for trainers before their start, and errors, of `interaction_check.unheard`."""
        return unheard(config, samples, known_loops(config.actor_rollout_ref.rollout.agent.agent_loop_config_path))

    def generate_sequences(self, prompts: DataProto) -> DataProto:
        """One trajectory per sample of `prompts`, in its order; repeat prompts beforehand for several responses each.

        Every sample has `raw_prompt` (chat messages) and may have `agent_name`; all its columns reach its loop.
        `meta_info["validate"]` selects `rollout.val_kwargs`, `meta_info["greedy"]` greedy sampling. Returns the tensors
        and objects of `batching.to_batch`, and `meta_info["timing"]`: seconds as `agent_loop/<metric>/{min,mean,max}`,
        `agent_loop/total_s`, and the metrics of COUNTS.

        The first sample that fails ends the batch at once with AgentLoopError, which holds the worker's traceback; a
        worker that dies raises RayActorError. An unknown agent_name is a ConfigError before anything is generated.

        If the next call has the same `prompts`, it generates what the one that failed lacks: what workers had finished
        is taken, and the others go on while one that died is started again.
        """
        # Loops work from the messages; tensors stay here.
        sampling: dict[str, Any] = {name: bool(prompts.meta_info.get(name, False)) for name in ("validate", "greedy")}
        sampling["global_steps"] = int(prompts.meta_info.get("global_steps", 0))
        samples = DataProto(None, prompts.non_tensor_batch, sampling)
        if not len(samples):
            raise ValueError("there are no samples: prompts needs at least the column raw_prompt")
        self._check_loops(set(samples.non_tensor_batch.get("agent_name", ())) - {None, ""})
        started = time.monotonic()
        bounds = np.linspace(0, len(samples), len(self._workers) + 1).round().astype(int).tolist()
        ranks = [rank for rank in range(len(self._workers)) if bounds[rank] < bounds[rank + 1]]

        def begin(rank: int) -> Any:
            start, stop = bounds[rank : rank + 2]
            return self._workers[rank].generate_sequences.remote(samples[start:stop], start)

        parts = self._parts_before(prompts)
        before = set(parts)
        parts |= {rank: begin(rank) for rank in ranks if rank not in parts}
        self._failed = prompts, parts
        results = self._gather(parts, self._deadline_s(len(samples)), begin, before)
        self._failed = None, {}
        for rank in ranks:  # what was there for a further attempt
            uids = samples.non_tensor_batch.get("uid", ())[bounds[rank] : bounds[rank + 1]]
            self._workers[rank].forget.remote(set(uids))
        batch = DataProto.concat([results[rank] for rank in ranks])
        metrics = batch.meta_info.pop("metrics")
        batch.meta_info["timing"] = _summary(metrics) | {"agent_loop/total_s": time.monotonic() - started}
        return batch

    @property
    def workers(self) -> list[Any]:
        """The actors; see `AgentLoopWorker.generate_sequences`."""
        return list(self._workers)

    def set_servers(self, server_handles: Sequence[Any]) -> int:
        """Use these servers from the next batch on. Restarts dead or silent workers; returns their number."""
        self._servers = list(server_handles)
        asked = {worker.set_servers.remote(self._servers): rank for rank, worker in enumerate(self._workers)}
        timeout_s = self._config.actor_rollout_ref.rollout.control_timeout_s
        answered, silent = ray.wait(list(asked), num_returns=len(asked), timeout=timeout_s)
        lost = sorted(asked[one] for one in (*silent, *filter(is_of_dead_actor, answered)))
        for rank in lost:
            logger.warning("agent-loop-worker-%d died or does not answer; starting it again", rank)
            ray.kill(self._workers[rank], no_restart=True)
            self._workers[rank] = self._start(rank, takes_over=True)
        self._await_started(lost, restarts=STARTED_AGAIN * len(lost))
        return len(lost)

    def close(self) -> None:
        """End the worker actors. Idempotent."""
        workers, self._workers = self._workers, []
        for worker in workers:
            ray.kill(worker, no_restart=True)

    def __enter__(self) -> AgentLoopManager:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _start(self, rank: int, *, takes_over: bool = False) -> Any:
        actor: Any = ray.remote(AgentLoopWorker)
        return actor.options(num_cpus=self._config.actor_rollout_ref.rollout.agent.num_cpus, max_restarts=0).remote(
            config=self._config,
            servers=self._servers,
            tokenizer_path=self._tokenizer_path,
            loops=self._loops,
            rank=rank,
            tool_calls=self._tool_calls,
            pictures=self._pictures,
            takes_over=takes_over,
        )

    def _await_started(self, ranks: Sequence[int], restarts: int = 0) -> None:
        """Raises AgentLoopTimeout, and RayActorError when more than `restarts` of them died instead."""
        timeout_s = self._config.actor_rollout_ref.rollout.startup_timeout_s
        deadline = time.monotonic() + timeout_s
        starting = {self._workers[rank].ready.remote(): rank for rank in ranks}
        while starting:
            started, _ = ray.wait(list(starting), num_returns=1, timeout=max(0.0, deadline - time.monotonic()))
            if not started:
                late = ", ".join(f"agent-loop-worker-{rank}" for rank in starting.values())
                raise AgentLoopTimeout(f"ready: no answer within {timeout_s} s from {late}")
            rank = starting.pop(started[0])
            try:
                ray.get(started[0])
            except RayActorError as exc:
                if restarts == 0:
                    raise
                restarts -= 1
                why = " ".join(str(exc).split())
                logger.warning("agent-loop-worker-%d died as it started; starting it again: %s", rank, why)
                self._workers[rank] = self._start(rank, takes_over=True)
                starting[self._workers[rank].ready.remote()] = rank

    def _check_loops(self, names: set[str]) -> None:
        for name in sorted(names):
            check_loop(name, self._loops)

    def _parts_before(self, prompts: DataProto) -> dict[int, Any]:
        """By rank, what an earlier call for these prompts has begun. Ends what one for others has."""
        failed, parts = self._failed
        if failed is prompts:
            return parts
        for reference in parts.values():
            ray.cancel(reference)
        return {}

    def _gather(
        self, parts: dict[int, Any], timeout_s: float, begin: Callable[[int], Any], before: set[int]
    ) -> dict[int, DataProto]:
        """The workers' results by rank. Raises the first failure at once, and leaves what did not fail in `parts`.

        Cancels the other workers unless one died. Parts that an attempt `before` has begun may fail of what has been
        healed since: they begin again.
        """
        results: dict[int, DataProto] = {}
        pending = {reference: rank for rank, reference in parts.items()}
        deadline = time.monotonic() + timeout_s
        try:
            while pending:
                ready = _first(pending, deadline - time.monotonic(), timeout_s)
                rank = pending.pop(ready)
                try:
                    results[rank] = ray.get(ready)
                except Exception:
                    del parts[rank]
                    if rank not in before:
                        raise
                    before.remove(rank)
                    parts[rank] = begin(rank)
                    pending[parts[rank]] = rank
        except BaseException as exc:
            if not isinstance(exc, RayActorError):
                for reference, rank in pending.items():
                    ray.cancel(reference)
                    del parts[rank]
            raise
        return results

    def _deadline_s(self, num_samples: int) -> float:
        """No batch takes longer when every generation and every tool takes its own deadline."""
        rollout = self._config.actor_rollout_ref.rollout
        rounds = math.ceil(num_samples / len(self._workers) / rollout.agent.max_concurrency)
        turns = rollout.multi_turn.max_assistant_turns or self._config.data.max_response_length  # a token each
        return rounds * turns * (rollout.generate_timeout_s + rollout.multi_turn.tool_timeout_s)


def _first(pending: Mapping[Any, int], left_s: float, timeout_s: float) -> Any:
    """The first reference that is done. Raises AgentLoopTimeout after `left_s`, the rest of `timeout_s`."""
    ready, _ = ray.wait(list(pending), num_returns=1, timeout=max(0.0, left_s))
    if not ready:
        late = ", ".join(f"agent-loop-worker-{rank}" for rank in pending.values())
        raise AgentLoopTimeout(f"not done within {timeout_s:.0f} s: {late}")
    return ready[0]


def _picture_processor(model: HFModelConfig) -> PictureProcessor | None:
    """Of a model that sees. Built-in text models are not made for that."""
    if model.path != SEEING_MODEL and not directory_sees(model.path, whole=model.language_model_only is False):
        return None
    return load_processor(resolve_model_path(model.path, need_tokenizer=False), load_hf_config(model))


def _summary(metrics: dict[str, list[Any]]) -> dict[str, float]:
    summary: dict[str, float] = {}
    for name, values in metrics.items():
        if name in COUNTS:
            summary[COUNTS[name]] = float(sum(values))
        else:
            for label, reduce in (("min", min), ("mean", fmean), ("max", max)):
                summary[f"agent_loop/{name}/{label}"] = float(reduce(values))
    return summary
