"""One rank's part in moving one checkpoint into engines: a pipeline of fetch, broadcast and load.

    fetch        | 0 | 1 | 2 | 3 |
    broadcast        | 0 | 1 | 2 | 3 |
    load                 | 0 | 1 | 2 | 3 |

One rank fetches a bucket into a half of its bucket memory and broadcasts it into a half of every other rank. Every
rank's engine loads it from there. Meanwhile the next buckets go into other halves, which each rank chooses itself.

A bucket in a rank's own shared memory is not fetched: it is broadcast from there, and the rank's engine maps it.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial

import torch

from ..errors import ActivationError, CheckpointEngineError, TransportTimeout
from ..memory.host_memory import KeptMemory
from .buckets import Bucket, BucketSize
from .collective_calls import CollectiveCall
from .engine_link import EngineLink
from .fetching import Fetcher, LinkBuffers, Sources
from .progress import Events

REQUEST_POLL_S = 0.05

Request = Callable[[list[tuple[str, str]]], None]
"""Requests the inference engines to receive. Called with (device id, socket path) of every updating rank, in order."""


@dataclass(kw_only=True)
class Transfer:
    """One rank's transfer in one update. Used once."""

    rank: int
    sources: Sources
    size: BucketSize
    order: Sequence[tuple[int, Bucket]]
    """(rank that fetches and broadcasts, bucket) of all buckets, in order."""
    together: CollectiveCall
    request: Request
    events: Events
    kept: KeptMemory
    """Memory for halves that is kept between updates."""
    _loading: deque[int] = field(default_factory=deque)
    """Buckets that the engine has been offered and has not loaded."""

    @cached_property
    def _num_halves(self) -> int:
        """Two, and the one into which the next bucket is fetched meanwhile if there is memory for it.

        No more than there are buckets that go through them.
        """
        through = sum(root != self.rank or not self.sources.is_lent(bucket) for root, bucket in self.order)
        return min(3 if self.size.staged else 2, through)

    def run(self) -> None:
        """Return when every rank's engine has accepted the checkpoint. Raises the first failure of any rank."""
        device = self.sources.device
        link = EngineLink(
            device.id,
            self.size.nbytes,
            halves=self._num_halves,
            lent=self.sources.lent,
            timeout_s=self.together.own_deadline.remaining_s,
            device=device.torch_device,
            kept=self.kept,
            on_loaded=lambda: self.events.record("load-end", self._loading.popleft()),
        )
        self.together.failure.then(link.abort)
        with link:
            try:
                paths = self.together.roster.exchange(
                    "engine links", (device.id, link.socket_path), self.together.deadline
                )
                request = self._ask([(device_id, path) for device_id, path in paths.values()])
                self._move(link)
                self.together.roster.exchange("loading", None, self.together.deadline)
                link.finish(self.together.own_deadline.remaining_s)
                self._await_answer(request)
                self.together.roster.exchange("finishing", None, self.together.deadline)
            except BaseException as exc:
                # Before the link closes, so that the engine hears the reason.
                self.together.failure.set(exc)
                raise

    def _move(self, link: EngineLink) -> None:
        own = [(number, bucket) for number, (root, bucket) in enumerate(self.order) if root == self.rank]
        fetched = [(number, bucket) for number, bucket in own if not self.sources.is_lent(bucket)]
        failure = self.together.failure
        halves = LinkBuffers(link, self._num_halves, self.together.own_deadline, failure)
        with Fetcher(
            self.sources, halves, fetched, ahead=self.size.staged, events=self.events, failure=failure
        ) as fetcher:
            fetcher.start()
            for number, (root, bucket) in enumerate(self.order):
                if root == self.rank and self.sources.is_lent(bucket):
                    offer = partial(link.offer, self._num_halves + bucket.buffer, bucket.tensors, bucket.offset)
                    self._broadcast(number, root, self.sources.own_memory(bucket), [offer])
                    continue
                half = fetcher.try_take() if root == self.rank else halves.try_take()
                if half is None:
                    self._land()  # so that the engine has something to load meanwhile
                    half = fetcher.take(number, bucket) if root == self.rank else halves.take()
                offers = [partial(link.offer, half, bucket.tensors), partial(halves.offered, half)]
                self._broadcast(number, root, halves.memory(half, bucket.nbytes), offers)
            self._land()
            link.await_loaded(self.together.own_deadline.remaining_s)
            fetcher.check_stamps()

    def _broadcast(self, number: int, root: int, memory: torch.Tensor, offers: Sequence[Callable[[], None]]) -> None:
        """Begin to. `offers` are called when it is there, perhaps while the next one is on its way."""

        def offer() -> None:
            self._loading.append(number)
            self.events.record("load-start", number)
            for each in offers:
                each()

        def arrived() -> None:
            self.events.record("broadcast-end", number)
            offer()

        if self.together.group is None:
            offer()
        else:
            self.events.record("broadcast-start", number)
            self.together.group.broadcast(
                memory, root, self.together.deadline, self.together.failure.check, done=arrived
            )

    def _land(self) -> None:
        if self.together.group is not None:
            self.together.group.land(self.together.deadline, self.together.failure.check)

    def _ask(self, paths: list[tuple[str, str]]) -> threading.Thread:
        """`request` returns only when the engines are done, so it runs beside the transfer."""

        def ask() -> None:
            try:
                self.request(paths)
            except Exception as exc:  # noqa: BLE001 - whatever the caller's function raises ends the update
                self.together.failure.set(_of_request(exc))

        thread = threading.Thread(target=ask, name="parameter-server-request", daemon=True)
        thread.start()
        return thread

    def _await_answer(self, request: threading.Thread) -> None:
        while request.is_alive():
            self.together.failure.check()
            if self.together.deadline.passed:
                raise TransportTimeout(
                    f"the engines have loaded, but the request to them has not returned within "
                    f"{self.together.deadline.timeout_s:.1f} s"
                )
            request.join(REQUEST_POLL_S)
        self.together.failure.check()


def _of_request(exc: Exception) -> CheckpointEngineError:
    if isinstance(exc, CheckpointEngineError):
        return exc
    error = ActivationError(f"the request to the engines failed: {type(exc).__name__}: {exc}")
    error.__cause__ = exc
    return error
