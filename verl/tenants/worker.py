"""Work that is done once: in turn on the thread that computes, or beside it. Answers are kept for who asks again."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter, deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, TypeAlias, TypeVar

from verl.tenants.refused import Refused
from verl.tenants.turns import Turns

KEPT = 2000
"""Answers of one queue, the newest."""

logger = logging.getLogger(__name__)

T = TypeVar("T")
Answer: TypeAlias = "bytes | dict[str, object]"
"""A message of `wire`, or a JSON object."""


@dataclass(frozen=True, slots=True)
class Request:
    owner: str
    fingerprint: str
    answer: asyncio.Future[Answer]


class Worker:
    """Its methods are called on the event loop."""

    def __init__(self, *, most_beside: int | None = None) -> None:
        """`most_beside`: requests of an owner that are under way beside the thread; clients try others again."""
        self._most_beside = most_beside
        self._beside: Counter[str] = Counter()
        """By owner, those under way."""
        self.outcomes: Counter[str] = Counter()
        """Of answers: done, user or server."""
        self._turns = Turns()
        self._requests: dict[str, Request] = {}
        self._queues: dict[str, deque[str]] = {}

    def submit(
        self,
        owner: str,
        queue: str,
        number: int | str,
        fingerprint: str,
        work: Callable[[], Any],
        *,
        write: Callable[[Any], Answer] | None = None,
    ) -> str:
        """Have `work` done on the thread, and then `write` of what it returns beside it, once for each `queue` and
        `number`; returns the id of the request.

        Raises Refused if the same number came before with other content. `Turns` has the order.
        """

        def begin() -> asyncio.Future[Answer]:
            done = asyncio.wrap_future(self._turns.submit(queue, work, write))
            return asyncio.ensure_future(_awaited(done))

        return self._once(owner, queue, number, fingerprint, begin)

    def begin(
        self, owner: str, queue: str, number: int | str, fingerprint: str, work: Callable[[], Awaitable[Answer]]
    ) -> str:
        """As `submit`, for work that waits on this event loop: it goes on beside all other work.

        Also raises Refused, with the status with which clients send it again, beyond `most_beside`.
        """

        def start() -> asyncio.Future[Answer]:
            if self._most_beside is not None and self._beside[owner] >= self._most_beside:
                raise Refused(f"{self._most_beside} requests of this key are under way; send it again", status=429)
            self._beside[owner] += 1
            answer = asyncio.ensure_future(_awaited(work()))
            answer.add_done_callback(lambda _: self._beside.subtract([owner]))
            return answer

        return self._once(owner, queue, number, fingerprint, start)

    def compute(self, work: Callable[[], T]) -> asyncio.Future[T]:
        """What `work` returns or raises, done in its turn on the thread."""
        return asyncio.wrap_future(self._turns.submit("", work))

    def _once(
        self,
        owner: str,
        queue: str,
        number: int | str,
        fingerprint: str,
        begin: Callable[[], asyncio.Future[Answer]],
    ) -> str:
        request_id = f"{queue}:{number}"
        if (known := self._requests.get(request_id)) is not None:
            if known.fingerprint != fingerprint:
                raise Refused(f"seq_id {number} of {queue} came before with other content")
            return request_id
        answer = begin()
        answer.add_done_callback(self._count)
        self._requests[request_id] = Request(owner, fingerprint, answer)
        kept = self._queues.setdefault(queue, deque())
        kept.append(request_id)
        if len(kept) > KEPT and self._requests[kept[0]].answer.done():
            del self._requests[kept.popleft()]
        return request_id

    def _count(self, answer: asyncio.Future[Answer]) -> None:
        if not answer.cancelled():
            found = answer.result()
            self.outcomes[str(found.get("category", "done")) if isinstance(found, dict) else "done"] += 1

    @property
    def unanswered(self) -> int:
        return sum(not request.answer.done() for request in self._requests.values())

    def knows(self, queue: str, number: int | str) -> bool:
        return f"{queue}:{number}" in self._requests

    async def answer(self, owner: str, request_id: str, timeout_s: float) -> Answer | None:
        """None if it is not there after `timeout_s`. Raises Refused for an id that is not of this owner."""
        request = self._requests.get(request_id)
        if request is None or request.owner != owner:
            raise Refused(
                f"there is no request {request_id!r} of this key, or its answer is no longer kept", status=404
            )
        done, _ = await asyncio.wait([request.answer], timeout=timeout_s)
        return next(iter(done)).result() if done else None

    def run(self, queue: str, work: Callable[[], object]) -> None:
        """Have `work` done in its turn; nobody asks for its answer."""
        self._turns.submit(queue, lambda: _done(work))

    def forget(self, queue: str) -> None:
        for request_id in self._queues.pop(queue, ()):
            self._requests.pop(request_id, None)

    def close(self) -> None:
        self._turns.close()


def _done(work: Callable[[], object]) -> None:
    try:
        work()
    except Exception:  # as below
        logger.exception("work without an answer failed")


async def _awaited(work: Awaitable[Answer]) -> Answer:
    try:
        return await work
    except Exception as exc:  # noqa: BLE001 - the server goes on for its other tenants
        return _told(exc)


def _told(exc: Exception) -> Answer:
    if isinstance(exc, Refused):
        return {"error": str(exc), "category": "user"}
    logger.error("a request failed", exc_info=exc)
    return {"error": f"{type(exc).__name__}: {exc}", "category": "server"}
