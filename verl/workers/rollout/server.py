"""The Ray actor around one inference engine.

    agent loops --generate-->  [group "generate": own event loop]  --\
                                                                      >-- engine loop (one thread) -- Engine
    replica     --pause, ...-> [default group: own event loop]     --/

Ray runs every concurrency group of an async actor on an event loop in a thread of its own; that keeps control calls
apart from thousands of parked `generate` calls. An engine's client may be used from one loop only, so all of it runs on
the engine loop, and both groups cross over with `EngineLoop.run`.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import logging
import os
import threading
from collections.abc import Callable, Collection, Coroutine, Hashable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import ray

from verl.checkpoint_engine.errors import ActivationError, CheckpointEngineError, IntegrityError
from verl.checkpoint_engine.plan.types import EngineCheckResult
from verl.checkpoint_engine.support.memory import MemoryUse, tree_use
from verl.utils.lifetime import begin_actor
from verl.utils.pictures import Medium
from verl.utils.timing import Span, SpanLog
from verl.workers.rollout.engine import Engine, EngineSpec, KeepingEngine, SeeingEngine, TellingEngine, TracedEngine
from verl.workers.rollout.errors import NoWeights, ReplicaTimeout, RolloutError
from verl.workers.rollout.kept_calls import KeptCalls
from verl.workers.rollout.records import NO_VERSION, PAUSE_MODES, CallName, SamplingOptions, TokenOutput
from verl.workers.rollout.written_calls import WrittenCalls

T = TypeVar("T")
logger = logging.getLogger(__name__)

CONCURRENCY: dict[str, Any] = {"concurrency_groups": {"generate": 100_000}, "max_concurrency": 64}
"""Calls that Ray lets run at once, as options of the actor. How many sequences decode at once is the engine's
`max_num_seqs`.

One group has a name, and the default group serves the other methods: of several named groups Ray 2.60 may run one loop
in two threads and another one never, on a machine that is busy while the actor starts."""


class EngineLoop:
    """An event loop in a daemon thread. Lives as long as the process: engine processes are children of its thread."""

    def __init__(self, name: str) -> None:
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, name=name, daemon=True).start()

    async def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Await `work` on the engine loop from any other loop. Cancelling this cancels `work`."""
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(work, self._loop))


class RolloutServer:
    """Serves one engine and guards it: nothing is generated from weights that are absent, torn or asleep.

    Actor methods come in two groups (see the module); underscore methods run on the engine loop, where all state lives.
    """

    def __init__(self, spec: EngineSpec) -> None:
        begin_actor()
        self._spec = spec
        module, _, class_name = spec.engine.partition(":")
        self._engine: Engine = getattr(importlib.import_module(module), class_name)(spec)
        self._loop = EngineLoop(f"{spec.name}-engine")
        usable = spec.config.load_format == "auto" and not spec.model.sends_adapters
        self._version: int | None = NO_VERSION if usable else None
        self._committed: tuple[str, int] | None = None
        self._torn = False
        """An activation began and did not succeed: the engine holds weights of two versions."""
        self._weights_asleep = False
        self._cache_asleep = False
        self._changing = asyncio.Lock()
        """Held while weights or memory change; `health` and `pause` do not take it, so they are always answered."""
        self._calls = KeptCalls()
        self._written = WrittenCalls(self._so_far)
        self._spans = SpanLog(spec.name)
        """`generating`: at least one request is here, `paused` or not; `loading` a version."""

    # -- group generate: called by agent loops ----------------------------------------------------------------------

    @ray.method(concurrency_group="generate")
    async def generate(
        self,
        prompt_ids: list[int],
        sampling: SamplingOptions,
        request_id: str,
        pictures: Sequence[Medium] = (),
        cache: str | None = None,
        name: CallName | None = None,
        written_to: Path | None = None,
    ) -> TokenOutput:
        """Sample one response to `prompt_ids`, which have the tokens of `pictures`. While paused, or while weights
        change, the call waits. `cache` is that of an earlier output of the same conversation. The answer to a call with
        a `name` is kept: see `take_calls`. What is sampled is written to the file `written_to` of the caller, if that
        is on this host and the engine tells: see `CallDirectory`.

        Raises NoWeights before the first activation, RolloutError for a prompt that does not fit, ReplicaTimeout after
        `rollout.generate_timeout_s`, ReplicaDied when the engine is gone.
        """
        work = self._generate(prompt_ids, sampling, request_id, pictures, cache)
        if written_to is not None and isinstance(self._engine, TellingEngine):
            work = self._while_written(work, request_id, written_to)
        return await self._loop.run(work if name is None else self._kept(work, request_id, name))

    async def _while_written(self, work: Coroutine[Any, Any, TokenOutput], request_id: str, path: Path) -> TokenOutput:
        with self._written.during(request_id, path) as write:
            output = await work
            write(output)
        return output

    async def _kept(self, work: Coroutine[Any, Any, TokenOutput], request_id: str, name: CallName) -> TokenOutput:
        with self._calls.during(request_id, name) as keep:
            output = await work
            keep(output)
        return output

    async def _generate(
        self,
        prompt_ids: list[int],
        sampling: SamplingOptions,
        request_id: str,
        pictures: Sequence[Medium],
        cache: str | None,
    ) -> TokenOutput:
        name, timeout_s = self._spec.name, self._spec.config.generate_timeout_s
        if self._version is None:
            await self._end_of_change(timeout_s)
        if self._version is None:
            raise NoWeights(f"{name} cannot generate: no version of the weights is active; sync the weights first")
        if not 0 < len(prompt_ids) < self._spec.max_model_len:
            raise RolloutError(
                f"{name}: request {request_id} has a prompt of {len(prompt_ids)} tokens; between 1 and "
                f"{self._spec.max_model_len - 1} fit (rollout.max_model_len={self._spec.max_model_len})"
            )
        try:
            async with asyncio.timeout(timeout_s):
                with self._spans.during("generating"):
                    output = await self._sampled(prompt_ids, sampling, request_id, pictures, cache)
            return output.by(name)
        except TimeoutError as exc:
            raise ReplicaTimeout(
                f"{name}: request {request_id} not finished within rollout.generate_timeout_s={timeout_s}"
            ) from exc

    async def _sampled(
        self,
        prompt_ids: list[int],
        sampling: SamplingOptions,
        request_id: str,
        pictures: Sequence[Medium],
        cache: str | None,
    ) -> TokenOutput:
        if not pictures:
            if cache is not None and isinstance(self._engine, KeepingEngine):
                return await self._engine.generate(prompt_ids, sampling, request_id, cache=cache)
            return await self._engine.generate(prompt_ids, sampling, request_id)
        if not isinstance(self._engine, SeeingEngine):
            raise RolloutError(f"{self._spec.name}: request {request_id} has pictures, which this engine does not see")
        return await self._engine.generate(prompt_ids, sampling, request_id, pictures)

    @ray.method(concurrency_group="generate")
    async def tokens_since(self, known: Mapping[str, int]) -> dict[str, TokenOutput] | None:
        """By request under way, the tokens after as many of them as are known (see `TellingEngine`), if it has more.
        None: the engine does not tell. Agent loops on other hosts ask again and again, and go on from there if this
        process dies."""
        return await self._loop.run(self._tokens_since(known))

    async def _tokens_since(self, known: Mapping[str, int]) -> dict[str, TokenOutput] | None:
        if not isinstance(self._engine, TellingEngine):
            return None
        found = {request_id: self._so_far(request_id, number) for request_id, number in known.items()}
        return {request_id: part for request_id, part in found.items() if part is not None}

    def _so_far(self, request_id: str, known: int) -> TokenOutput | None:
        part = self._engine.so_far(request_id, known) if isinstance(self._engine, TellingEngine) else None
        return None if part is None else part.by(self._spec.name)

    @ray.method(concurrency_group="generate")
    async def forget_calls(self, owner: str, samples: Collection[Hashable]) -> None:
        """A worker has all answers of these samples."""
        await self._loop.run(self._forget_calls(owner, samples))

    async def _forget_calls(self, owner: str, samples: Collection[Hashable]) -> None:
        self._calls.forget(owner, samples)

    @ray.method(concurrency_group="generate")
    async def take_calls(self, owner: str) -> list[tuple[CallName, TokenOutput]]:
        """The answers of a worker that died, for the one in its place. Those under way end: an engine that tells has
        their tokens."""
        return await self._loop.run(self._take_calls(owner))

    async def _take_calls(self, owner: str) -> list[tuple[CallName, TokenOutput]]:
        taken = self._calls.take(owner, lambda request_id: self._so_far(request_id, 0))
        return [(call, output.by(self._spec.name)) for call, output in taken]

    async def _end_of_change(self, timeout_s: float) -> None:
        """Until an activation that is under way, if any, is over."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._changing.acquire()
                self._changing.release()

    # -- default group: called by the replica -----------------------------------------------------------------------

    async def start(self) -> tuple[str, ...]:
        """Start the engine; returns the tensors that it keeps in float32: see `Engine.start`."""
        kept_wide = await self._loop.run(self._engine.start())
        return tuple(kept_wide or ())

    async def pid(self) -> int:
        """The process id of the server, for tests and users."""
        return os.getpid()

    async def health(self) -> int | None:
        """The active version (None: nothing yet, NO_VERSION: from disk). Raises if the engine does not answer."""
        return await self._loop.run(self._health())

    async def _health(self) -> int | None:
        await self._engine.health()
        return self._version

    async def take_spans(self) -> list[Span]:
        """The spans of the engine's activities since the last call."""
        return await self._loop.run(self._take_spans())

    async def memory(self) -> MemoryUse:
        """The memory of this process and its engine's."""
        return await asyncio.to_thread(tree_use, self._spec.name)

    async def _take_spans(self) -> list[Span]:
        return self._spans.take()

    async def pause(self, mode: str) -> None:
        if mode not in PAUSE_MODES:
            raise ValueError(f"pause mode {mode!r} is not one of: {', '.join(PAUSE_MODES)}")
        await self._loop.run(self._pause(mode))

    async def _pause(self, mode: str) -> None:
        self._spans.begin("paused")
        await self._engine.pause(mode)

    async def activate(self, arena_path: str, version: int) -> EngineCheckResult | None:
        """Load `version`. Raises ActivationError or, if the engine then computes with something else, IntegrityError;
        the server then refuses to generate until an activation succeeds."""
        return await self._loop.run(self._locked(self._activate, arena_path, version))

    async def _activate(self, arena_path: str, version: int) -> EngineCheckResult | None:
        self._version, self._torn = None, True
        try:
            if self._weights_asleep:
                await self._engine.wake(weights=True)
                self._weights_asleep = False
            self._spans.begin("loading", version)
            checked = await self._engine.activate(arena_path, version)
        except Exception as exc:
            reason = exc.message if isinstance(exc, CheckpointEngineError) else f"{type(exc).__name__}: {exc}"
            kind = IntegrityError if isinstance(exc, IntegrityError) else ActivationError
            raise kind(
                f"weights from {arena_path} were not loaded: {reason}",
                version=version,
                phase="activate",
                member=self._spec.name,
            ) from exc
        finally:
            self._spans.end("loading")
        self._version, self._torn = version, False
        self._committed = (arena_path, version)
        return checked

    async def resume(self) -> None:
        """Generate again; allocates a sleeping KV cache first. Raises NoWeights after a failed activation."""
        await self._loop.run(self._locked(self._resume))

    async def _resume(self) -> None:
        if self._torn:  # requests that pause("keep") froze would go on with torn weights
            raise NoWeights(f"{self._spec.name} cannot resume: its last activation failed; activate a version first")
        await self._wake_cache()
        await self._engine.resume()
        self._spans.end("paused", self._version)

    async def profile(self, prefix: str | None) -> None:
        """Begin a trace whose files begin with `prefix`, or end it. Does nothing for an engine without traces."""
        if isinstance(self._engine, TracedEngine):
            await self._loop.run(self._engine.start_profile(prefix) if prefix else self._engine.stop_profile())

    async def clear_cache(self) -> None:
        await self._loop.run(self._locked(self._engine.clear_cache))

    async def sleep(self, weights: bool) -> bool:
        """Abort, pause, and free the KV cache (and `weights`). False if the engine cannot sleep."""
        return await self._loop.run(self._locked(self._sleep, weights))

    async def _sleep(self, weights: bool) -> bool:
        if not self._spec.can_sleep:
            logger.info("%s does not sleep on %s", self._spec.name, self._spec.device)
            return False
        await self._pause("abort")
        await self._engine.sleep(weights=weights)
        self._cache_asleep = True
        if weights:
            self._weights_asleep, self._version = True, None
        return True

    async def wake_up(self) -> None:
        """Undo `sleep`: allocate, load the version that was active before, allocate the KV cache, generate."""
        await self._loop.run(self._locked(self._wake_up))

    async def _wake_up(self) -> None:
        if self._weights_asleep and self._committed is not None:
            await self._activate(*self._committed)
        elif self._weights_asleep:  # slept before its first version; the first sync fills it
            await self._engine.wake(weights=True)
            self._weights_asleep = False
        await self._resume()

    async def wake_cache(self) -> None:
        await self._loop.run(self._locked(self._wake_cache))

    async def _wake_cache(self) -> None:
        if self._cache_asleep:
            await self._engine.wake(weights=False)
            self._cache_asleep = False

    async def shutdown(self) -> None:
        await self._loop.run(self._engine.shutdown())

    async def _locked(self, work: Callable[..., Coroutine[Any, Any, T]], *args: Any) -> T:
        async with self._changing:
            return await work(*args)
