"""An event loop on a thread of its own."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine
from concurrent.futures import Future
from typing import Any, TypeVar

T = TypeVar("T")


class LoopThread:
    """Runs coroutines for one calling thread. `close` cancels those that still run and waits for their end."""

    def __init__(self, name: str) -> None:
        self._loop: asyncio.AbstractEventLoop
        self._stop: asyncio.Event
        self._tasks: dict[Future[Any], asyncio.Task[Any]] = {}
        started = threading.Event()
        self._thread = threading.Thread(target=self._serve, args=(started,), name=name, daemon=True)
        self._thread.start()
        started.wait()

    def start(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        """Start `work`. The future is done after `work` has ended, also if it was cancelled (CancelledError)."""
        outcome: Future[T] = Future()
        self._loop.call_soon_threadsafe(self._begin, outcome, work)
        return outcome

    def cancel(self, outcome: Future[Any]) -> None:
        """Cancel the work of a future of `start`."""
        self._loop.call_soon_threadsafe(self._cancel, outcome)

    def cancel_all(self) -> None:
        """Cancel all work, without waiting for its end."""
        self._loop.call_soon_threadsafe(lambda: [task.cancel() for task in self._tasks.values()])

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Run `work` and wait. A Ctrl-C cancels it and is raised after it has ended; a second one at once."""
        outcome: Future[T] = Future()
        try:  # an interrupt may come at any line
            self._loop.call_soon_threadsafe(self._begin, outcome, work)
            return outcome.result()
        except BaseException:
            if not outcome.done():
                self.cancel(outcome)
                outcome.exception()
            raise

    def close(self) -> None:
        """Cancel all work, wait for its end, and stop the thread. Idempotent."""
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._stop.set)
            self._thread.join()

    def _serve(self, started: threading.Event) -> None:
        async def until_stopped() -> None:
            self._loop, self._stop = asyncio.get_running_loop(), asyncio.Event()
            started.set()
            await self._stop.wait()

        with asyncio.Runner() as runner:  # cancels what is left, and waits for it
            runner.run(until_stopped())

    def _begin(self, outcome: Future[T], work: Coroutine[Any, Any, T]) -> None:
        task = self._tasks[outcome] = self._loop.create_task(work)
        task.add_done_callback(lambda task: self._settle(outcome, task))

    def _cancel(self, outcome: Future[Any]) -> None:
        if outcome in self._tasks:
            self._tasks[outcome].cancel()
        elif not outcome.done():  # it was never begun
            outcome.set_exception(asyncio.CancelledError())

    def _settle(self, outcome: Future[T], task: asyncio.Task[T]) -> None:
        del self._tasks[outcome]
        if task.cancelled():
            outcome.set_exception(asyncio.CancelledError())
        elif (error := task.exception()) is not None:
            outcome.set_exception(error)
        else:
            outcome.set_result(task.result())
