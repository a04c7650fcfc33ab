"""One thread for the work of all queues, and some beside it that write what was copied."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from threading import Lock
from typing import Any

WRITERS = 4
"""They mostly wait for the disk."""


@dataclass(frozen=True, slots=True)
class _Work:
    number: int
    do: Callable[[], Any]
    write: Callable[[Any], Any] | None
    future: Future[Any]


class Turns:
    """The work of a queue is done in its order: what comes next begins when all before it is done, and written.

    Among queues what has waited longest comes first.
    """

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="tenants")
        self._writers = ThreadPoolExecutor(WRITERS, thread_name_prefix="tenants-files")
        self._lock, self._numbers = Lock(), itertools.count()
        self._waiting: dict[str, deque[_Work]] = {}
        """By queue; none is empty."""
        self._under_way: set[str] = set()
        self._closed = False

    def submit(self, queue: str, do: Callable[[], Any], write: Callable[[Any], Any] | None = None) -> Future[Any]:
        """What `do` returns or raises on the thread; or `write` of it, beside the thread."""
        work = _Work(next(self._numbers), do, write, Future())
        with self._lock:
            self._waiting.setdefault(queue, deque()).append(work)
        self._thread.submit(self._next)
        return work.future

    def _next(self) -> None:
        """Do one work whose turn it is. Called at least once for each: also when a queue has ended one."""
        with self._lock:
            ready = [(line[0].number, queue) for queue, line in self._waiting.items() if queue not in self._under_way]
            if not ready:
                return
            queue = min(ready)[-1]
            work = self._waiting[queue].popleft()
            if not self._waiting[queue]:
                del self._waiting[queue]
            self._under_way.add(queue)
        if work.future.set_running_or_notify_cancel():
            self._run(queue, work, work.do)
        else:
            self._end(queue)

    def _run(self, queue: str, work: _Work, do: Callable[[], Any]) -> None:
        try:
            found = do()
        except BaseException as exc:  # noqa: BLE001 - it is for who waits
            self._end(queue)
            work.future.set_exception(exc)
        else:
            if work.write is not None and do is work.do:
                self._writers.submit(self._run, queue, work, partial(work.write, found))
            else:
                self._end(queue)
                work.future.set_result(found)

    def _end(self, queue: str) -> None:
        with self._lock:
            self._under_way.discard(queue)
            if queue in self._waiting and not self._closed:
                self._thread.submit(self._next)

    def close(self) -> None:
        """What is under way is done; who waits for the rest is not answered."""
        with self._lock:
            self._closed = True
        for executor in (self._thread, self._writers):
            executor.shutdown(cancel_futures=True)
        for work in itertools.chain.from_iterable(self._waiting.values()):
            work.future.cancel()
