"""`ServerManager` distributes requests over rollout servers and continues aborted ones."""

from __future__ import annotations

import asyncio
import itertools
from collections import OrderedDict
from collections.abc import Hashable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import ActorUnavailableError, RayActorError, RayTaskError

from verl.experimental.agent_loop.attempts import Attempt, Call, asked
from verl.experimental.agent_loop.unfinished import TOLD_EVERY_S, Listener, Partial
from verl.utils.pictures import Medium, Picture, Video
from verl.utils.seeds import derived
from verl.workers.rollout.errors import NoWeights, ReplicaDied, ReplicaTimeout
from verl.workers.rollout.records import CallName, SamplingOptions, TokenOutput
from verl.workers.rollout.written_calls import CallDirectory

FIRST_WAIT_S, LONGEST_WAIT_S = 0.05, 1.0
"""Waits between attempts after a server aborts a request before its first token: it is probably changing weights."""


COUNTS = {
    "retries": "agent_loop/retries",
    "continuations": "agent_loop/continuations",
    "computed_again": "rollout/prefill_again_tokens",
    "taken_over": "agent_loop/taken_over_tokens",
}
"""Counts of a `Sample`, and their metrics."""


@dataclass(slots=True)
class Sample:
    """Whose requests they are, and what they cost."""

    group: str | None = None
    """Samples of one group have the same prompt."""
    retries: int = 0
    """Calls repeated on another server because theirs died or had no weights."""
    continuations: int = 0
    """Calls made to continue an aborted response."""
    computed_again: int = 0
    """Tokens whose keys and values engines had, and computed again because of a sync, as far as they say."""
    taken_over: int = 0
    """Tokens of servers that died, and of attempts that failed, which are not sampled again."""
    keepers: set[Any] = field(default_factory=set)
    """Servers that keep calls of it."""


@dataclass(slots=True, eq=False)
class _Server:
    handle: Any
    name: str
    listener: Listener
    in_flight: int = 0
    dead: bool = False


@dataclass(slots=True)
class _Conversation:
    """What a server has of the requests with one id."""

    server: _Server
    cache: str | None = None
    """See `TokenOutput.cache`."""
    version: int | None = None
    """Of the weights at the end of the last output."""
    kept: int = 0
    """The first tokens whose keys and values the next request finds, unless a sync takes them."""
    interrupted: bool = False
    """The last output was, by a sync."""

    def lost(self, num_prompt: int, output: TokenOutput) -> int:
        """Tokens of the prompt of this next output that were computed again because of a sync. The rest of a turn that
        fills no block, and blocks that made room for others, are none of them."""
        version = output.weight_versions[0].version
        same = output.cache == self.cache if output.cache is not None else version == self.version
        return 0 if same and not self.interrupted else max(0, min(self.kept, num_prompt) - output.cached_tokens)

    def note(self, num_prompt: int, output: TokenOutput) -> None:
        self.cache, self.version = output.cache, output.weight_versions[-1].version
        self.interrupted = output.stop_reason == "aborted"
        # Without the interruption the last block would have been filled. The last token has not been read.
        self.kept = num_prompt + len(output.token_ids) - 1 if self.interrupted else output.reusable


class ServerManager:
    """Spreads requests over rollout servers. One per agent-loop worker, on its event loop.

    A server is an actor with `generate` and `tokens_since` of `RolloutServer`. Requests go to the server with the
    fewest of ours in flight; those of one `request_id` stay on the server that has their prefix cached. If it dies they
    go on at another one, after the tokens that it has told of. One with a seed begins again, as its tokens then are
    those that it would have had.
    """

    def __init__(
        self,
        servers: Sequence[Any],
        *,
        timeout_s: float,
        continue_aborted: bool = True,
        max_sticky_requests: int = 10_000,
        first_server: int = 0,
        told_every_s: float = TOLD_EVERY_S,
        directory: CallDirectory | None = None,
    ) -> None:
        """`timeout_s` is the deadline of one `generate`, with continuations. `first_server` breaks the first tie, so
        that workers begin with different servers. Servers on this host write unfinished tokens into `directory`; others
        are asked for them every `told_every_s`. Raises ValueError without servers."""
        if not servers:
            raise ValueError("there are no rollout servers to send requests to")
        self._servers = [
            _Server(handle, f"server-{index}", Listener(handle, told_every_s, directory))
            for index, handle in enumerate(servers)
        ]
        self._timeout_s = timeout_s
        self._continue_aborted = continue_aborted
        self._sticky: OrderedDict[str, _Conversation] = OrderedDict()
        self._groups: OrderedDict[str, _Conversation] = OrderedDict()
        """The first conversation of each group: the others begin with its prefix."""
        self._max_sticky_requests = max_sticky_requests
        self._turn = first_server
        self._call_number = itertools.count()

    async def generate(
        self,
        request_id: str,
        prompt_ids: Sequence[int],
        sampling_params: SamplingOptions | Mapping[str, Any],
        *,
        image_data: Sequence[Picture] | None = None,
        video_data: Sequence[Video] | None = None,
        sample: Sample | None = None,
        so_far: Partial | None = None,
        name: CallName | None = None,
    ) -> TokenOutput:
        """One response of at most `sampling_params["max_tokens"]` tokens. `image_data` are pictures and `video_data`
        videos of the prompt, which includes their tokens. Counts in `sample`. Goes on with `so_far`, which has what is
        known of the response when this raises. Servers keep what has a `name`.

        Continues an aborted response from its tokens so far, with the rest of the budget, on the current weights;
        log-probs and versions stay with their tokens. With `continue_aborted=False` returns it as `aborted`. Raises
        ReplicaTimeout at the deadline, ReplicaDied when no server is left, and a server's errors.
        """
        pictures: list[Medium] = []
        for key, given, kind in (("image_data", image_data, Picture), ("video_data", video_data, Video)):
            if strangers := [type(each).__name__ for each in given or () if not isinstance(each, kind)]:
                raise ValueError(f"generate: {key} is the `multi_modal_data` of the sample, not {strangers[0]}")
            pictures += given or ()
        sampling = SamplingOptions.of(sampling_params)
        sample = sample or Sample()
        so_far = so_far or Partial(sampling.max_tokens)
        deadline = asyncio.timeout(self._timeout_s)
        try:
            async with deadline:
                wait_s = FIRST_WAIT_S
                while so_far.room and so_far.ended is None:
                    budget = replace(sampling, max_tokens=so_far.room, seed=so_far.seed(sampling.seed))
                    tokens = [*prompt_ids, *so_far.token_ids]
                    output = await self._on_some_server(request_id, sample, tokens, budget, pictures, so_far, name)
                    so_far.add(output)
                    if output.stop_reason not in ("aborted", "died"):
                        return so_far.output(output.stop_reason)
                    if output.stop_reason == "died":
                        sample.taken_over += len(output.token_ids)
                        continue
                    if not so_far.room:
                        break
                    if not self._continue_aborted:
                        return so_far.output("aborted")
                    sample.continuations += 1
                    if not output.token_ids:
                        await asyncio.sleep(wait_s)
                        wait_s = min(2 * wait_s, LONGEST_WAIT_S)
                return so_far.output(so_far.ended or "length")
        except TimeoutError as exc:
            if not deadline.expired():  # somebody else's
                raise
            conversation = self._sticky.get(request_id)
            server = conversation.server.name if conversation else "the server"
            raise ReplicaTimeout(
                f"request {request_id}: {server} did not finish within "
                f"rollout.generate_timeout_s={self._timeout_s:g} ({len(prompt_ids)} prompt tokens, "
                f"{len(so_far.token_ids)} of {sampling.max_tokens} response tokens so far)"
            ) from exc

    async def _on_some_server(
        self,
        request_id: str,
        sample: Sample,
        token_ids: list[int],
        sampling: SamplingOptions,
        pictures: Sequence[Medium],
        so_far: Partial,
        name: CallName | None,
    ) -> TokenOutput:
        """Try the servers in turn until one can answer, or has died and told of some tokens. If this is cancelled,
        `so_far` has what was told."""
        failures: dict[str, Exception] = {}
        if name is not None:
            name = replace(name, start=len(so_far.token_ids))
        while True:
            conversation = self._choose(request_id, sample.group, failures)
            if conversation is None:
                reasons = "; ".join(f"{name}: {_first_line(exc)}" for name, exc in failures.items())
                raise ReplicaDied(
                    f"request {request_id}: none of {len(self._servers)} rollout servers can generate: "
                    f"{reasons or 'all died earlier'}"
                )
            server = conversation.server
            call_id = f"{request_id}.{next(self._call_number)}"  # engines refuse an id that is in use
            output: TokenOutput | None = None
            with nullcontext() if sampling.seed is not None else server.listener.listening(call_id) as told:
                server.in_flight += 1
                so_far.told = told
                try:
                    if name is not None:
                        sample.keepers.add(server.handle)
                    written_to = told.written_to if told is not None else None
                    output = await self._call(
                        conversation, token_ids, sampling, call_id, pictures, name=name, written_to=written_to
                    )
                except (RayActorError, ReplicaDied, NoWeights) as exc:
                    # NoWeights and an unavailable actor may pass; a dead one is not asked again.
                    server.dead = not isinstance(exc, (NoWeights, ActorUnavailableError))
                    failures[server.name] = exc
                    sample.retries += 1
                    output = told.output() if told is not None else None
                except asyncio.CancelledError:
                    if told is not None and (output := told.output()) is not None:
                        so_far.add(output)
                    raise
                else:
                    if output.stop_reason == "died":
                        server.dead = True
                        sample.retries += 1
                finally:
                    server.in_flight -= 1
                    so_far.told = None
            if output is not None:
                self._note(conversation, sample, len(token_ids), output)
                return output

    def _note(self, conversation: _Conversation, sample: Sample, num_prompt: int, output: TokenOutput) -> None:
        """Count what was computed a second time, and keep the name of the cache."""
        if not output.token_ids:  # nobody knows what was computed
            return
        sample.computed_again += conversation.lost(num_prompt, output) + output.computed_again
        conversation.note(num_prompt, output)
        if sample.group is not None and output.cache is not None and output.stop_reason != "died":
            self._groups.setdefault(sample.group, conversation)
            while len(self._groups) > self._max_sticky_requests:
                self._groups.popitem(last=False)

    async def _call(
        self,
        conversation: _Conversation,
        token_ids: list[int],
        sampling: SamplingOptions,
        call_id: str,
        pictures: Sequence[Medium],
        **names: CallName | Path | None,
    ) -> TokenOutput:
        """One remote call; its server stops working on it when this is cancelled. Raises the server's own errors."""
        further: dict[str, Any] = {"pictures": pictures} if pictures else {}
        if conversation.cache is not None:
            further["cache"] = conversation.cache
        further |= {key: value for key, value in names.items() if value is not None}
        reference = conversation.server.handle.generate.remote(
            prompt_ids=token_ids, sampling=sampling, request_id=call_id, **further
        )
        try:
            output: TokenOutput = await reference
        except asyncio.CancelledError:
            ray.cancel(reference)
            raise
        except RayTaskError as exc:
            if isinstance(exc.cause, (ReplicaDied, ReplicaTimeout, NoWeights)):
                raise exc.cause from exc
            raise
        return output

    def _choose(self, request_id: str, group: str | None, failures: dict[str, Exception]) -> _Conversation | None:
        usable = [server for server in self._servers if not server.dead and server.name not in failures]
        chosen = self._sticky.get(request_id)
        if chosen is None or chosen.server not in usable:
            if not usable:
                return None
            first = self._turn % len(usable)
            self._turn += 1
            server = min(usable[first:] + usable[:first], key=lambda server: server.in_flight)
            sibling = self._groups.get(group) if group is not None else None
            cache = sibling.cache if sibling is not None and sibling.server is server else None
            chosen = _Conversation(server, cache)
            self._sticky[request_id] = chosen
        self._sticky.move_to_end(request_id)
        while len(self._sticky) > self._max_sticky_requests:
            self._sticky.popitem(last=False)
        return chosen


def _first_line(exc: Exception) -> str:
    return (str(exc).strip().splitlines() or [type(exc).__name__])[0]


class Recording:
    """A `ServerManager` for one sample, of `group`, that records its outputs and counts."""

    def __init__(
        self,
        servers: ServerManager,
        group: str | None = None,
        seed: int | None = None,
        before: Sequence[Call] = (),
        name: tuple[str, Hashable] | None = None,
    ) -> None:
        """With `seed` every call has a seed of its own, from it and the number of calls before; else the engine draws.
        A loop's own seed takes its place. `before`: the calls of an attempt that failed. With `name`, of worker and
        sample, servers keep calls without a seed."""
        self._servers = servers
        self.sample = Sample(group)
        self._seed, self._name = seed, name
        self.may_be_repeated = group is not None and seed is None
        """Whether an attempt after this one can take what it has."""
        self._calls = itertools.count()
        self.attempt = Attempt(list(before))
        self.generated: list[TokenOutput] = []

    async def generate(
        self,
        request_id: str,
        prompt_ids: Sequence[int],
        sampling_params: SamplingOptions | Mapping[str, Any],
        **seen: Any,
    ) -> TokenOutput:
        """See `ServerManager.generate`."""
        sampling, call = SamplingOptions.of(sampling_params), next(self._calls)
        if self._seed is not None:
            given = self._seed if sampling.seed is None else sampling.seed
            sampling = replace(sampling, seed=derived(given, call))
        request = asked(prompt_ids, sampling, seen.get("image_data"))
        known = self.attempt.begin(request, sampling.max_tokens) if sampling.seed is None else None
        if known is not None:
            self.sample.taken_over += known.num_tokens
            if known.output is not None:
                self.generated.append(known.output)
                return known.output
        so_far = name = None
        if known is not None:
            so_far = known.so_far
            if self._name is not None:
                name = CallName(*self._name, request, sampling.max_tokens, 0)
        output = await self._servers.generate(
            request_id, prompt_ids, sampling, sample=self.sample, so_far=so_far, name=name, **seen
        )
        if known is not None:
            known.output = output
        self.generated.append(output)
        return output

    @property
    def seen(self) -> tuple[str, ...]:
        """See `TokenOutput.seen`: of the last call with pictures."""
        return next((output.seen for output in reversed(self.generated) if output.seen), ())
