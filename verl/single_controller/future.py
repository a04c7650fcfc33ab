"""`WorkerFuture`: the pending results of one call on the ranks of a group."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Generator, Mapping
from typing import Any, Protocol, TypeAlias

import ray
from ray.exceptions import RayActorError

from verl.single_controller.errors import WorkerTimeout

Ref: TypeAlias = "ray.ObjectRef[Any]"
ASKS_AFTER_S = 20.0
"""The time after the call, or a rank's last answer, after which the driver checks that the other ranks live."""
ALL_SILENT_S = 60.0
"""While no rank is done, all may be silent for at least this time: they may import libraries on a busy machine."""


def is_of_dead_actor(answer: Ref) -> bool:
    """Whether the available `answer` reports that its actor has died."""
    try:
        ray.get(answer)
    except RayActorError:
        return True
    return False


class FailureHandler(Protocol):
    """Interprets a rank's failure. May block for seconds: it checks whether the other ranks live."""

    def __call__(self, method: str, rank: int, error: BaseException, unfinished: Mapping[Ref, int]) -> BaseException:
        """The exception for the caller of `method`. `unfinished` are the calls of ranks without an answer so far."""


class SilenceHandler(Protocol):
    """Checks whether unfinished ranks live. May block for as long as they may be silent."""

    def __call__(self, method: str, unfinished: Mapping[Ref, int]) -> BaseException | None:
        """The exception for the caller of `method`; None if all ranks answer, or one is done or has failed."""


class WorkerFuture:
    """One call on the ranks of a group. Wait with `get`, or with `await` on an event loop; any number of times.

    The first rank that fails ends the wait at once: the other ranks may wait for it in a collective for ever. Giving up
    (a timeout, a cancelled task) does not stop the ranks. `get` regularly checks that the ranks it waits for live,
    because otherwise a stopped rank may never be noticed.
    """

    def __init__(
        self,
        refs: Mapping[Ref, int],
        *,
        group: str,
        method: str,
        collect: Callable[[list[Any]], Any],
        on_failure: FailureHandler,
        on_silence: SilenceHandler,
        silence_s: float,
    ) -> None:
        """`refs` maps each rank's pending result to the rank; `collect` gets the results in the order of ranks.

        `silence_s` is the time that ranks have to answer `on_silence`.
        """
        self._pending = dict(refs)
        self._ranks = sorted(refs.values())
        self._results: dict[int, Any] = {}
        self._error: BaseException | None = None
        self._group = group
        self._method = method
        self._collect = collect
        self._on_failure = on_failure
        self._on_silence = on_silence
        self._silence_s = silence_s
        self._asks_after_s = min(ASKS_AFTER_S, silence_s)

    def get(self, timeout: float | None = None) -> Any:
        """The result. Raises what the first failing rank raised, WorkerDied, or WorkerTimeout after `timeout` s."""
        deadline = None if timeout is None else time.monotonic() + timeout
        self._raise_error()
        silent_since: float | None = None
        while self._pending:
            remaining = None if deadline is None else max(0.0, deadline - time.monotonic())
            asks = remaining is None or remaining > self._asks_after_s + self._silence_s
            ready, _ = ray.wait(list(self._pending), timeout=self._asks_after_s if asks else remaining)
            if ready:
                self._receive(ready[0])
            elif asks:
                asked_s = time.monotonic()
                error = self._on_silence(self._method, self._pending)
                silent_since = None if error is None else silent_since or asked_s
                if silent_since and (self._results or time.monotonic() - silent_since >= ALL_SILENT_S):
                    self._error = error
                    self._raise_error()
            else:
                raise WorkerTimeout(
                    f"worker group {self._group!r}: {self._method} not done within {timeout} s on ranks "
                    f"{sorted(self._pending.values())}; done: {sorted(self._results)}",
                    group=self._group,
                )
        return self._finish()

    def __await__(self) -> Generator[Any, None, Any]:
        return self._wait().__await__()

    async def _wait(self) -> Any:
        self._raise_error()
        arrivals = {asyncio.wrap_future(ref.future()): ref for ref in self._pending}
        try:
            waiting = set(arrivals)
            while waiting:
                done, waiting = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
                for arrival in done:
                    if arrival.exception() is not None:
                        await asyncio.to_thread(self._receive, arrivals[arrival])
                    elif (rank := self._pending.pop(arrivals[arrival], None)) is not None:
                        self._results[rank] = arrival.result()
        finally:
            for arrival in arrivals:
                if not arrival.cancel() and not arrival.cancelled():
                    arrival.exception()  # a second failure must not be reported as never retrieved
        return self._finish()

    def _receive(self, ref: Ref) -> None:
        rank = self._pending.pop(ref)
        try:
            self._results[rank] = ray.get(ref)
        except Exception as error:  # noqa: BLE001 - whatever it is, it becomes the caller's
            self._error = self._on_failure(self._method, rank, error, self._pending)
        self._raise_error()

    def _raise_error(self) -> None:
        if self._error is not None:
            raise self._error

    def _finish(self) -> Any:
        return self._collect([self._results[rank] for rank in self._ranks])
