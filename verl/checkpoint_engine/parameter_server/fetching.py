"""Fetch the buckets that a rank broadcasts, from its own host memory or a peer's."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import ExitStack
from dataclasses import dataclass
from types import TracebackType
from typing import Self

import torch

from ..errors import BackendUnavailable, TransportError, TransportTimeout
from ..links.rendezvous import Deadline
from ..links.stamps import Stamp
from ..memory.host_memory import pinned_memory
from ..memory.publishing import copy_values
from .buckets import Bucket
from .buffers import HostBuffer
from .engine_link import EngineLink
from .peers import PeerReader
from .progress import Events, FirstFailure
from .rank_device import Device
from .records import RankMetas

POLL_S = 0.2
LAST_WORD_S = 0.5
MAX_LENT = 128
"""File descriptors that go to an engine; one message carries 253 at most."""


@dataclass(frozen=True, kw_only=True)
class Sources:
    """The sources of a rank's buckets in one update: its own buffers, and peers."""

    device: Device
    metas: Mapping[int, RankMetas]
    own: Sequence[HostBuffer]
    """The buffers that this rank has registered."""
    own_incarnation: int
    """The incarnation that marks this rank in `metas` (ranks of other jobs may have the same number); 0: none."""
    reader: PeerReader
    deadline: Deadline
    stop: threading.Event
    """Ends reads when it is set."""

    def is_own(self, owner: int) -> bool:
        return self.own_incarnation != 0 and self.metas[owner].incarnation == self.own_incarnation

    @property
    def lent(self) -> list[int]:
        """File descriptors of the first MAX_LENT own buffers, from which the engine can load; none on devices."""
        return [buffer.shared.fd for buffer in self.own[:MAX_LENT] if buffer.shared is not None]

    def is_lent(self, bucket: Bucket) -> bool:
        """Whether `bucket` is in lent memory: it is broadcast and loaded from there, without a fetch."""
        return self.is_own(bucket.owner) and bucket.buffer < len(self.lent)

    def own_memory(self, bucket: Bucket) -> torch.Tensor:
        """The memory of `bucket`, which this rank owns."""
        return self.own[bucket.buffer].memory[bucket.offset : bucket.offset + bucket.nbytes]

    def fill(self, memory: torch.Tensor, bucket: Bucket, landing: torch.Tensor | None) -> None:
        """Copy `bucket` into `memory` on the device; a peer's bytes first into `landing` (host), if there is one.

        Raises TransportError.
        """
        if self.is_own(bucket.owner):
            copy_values(memory, self.own_memory(bucket))
        elif landing is None:
            self._read(bucket.owner, bucket.address, memory)
        else:
            self._read(bucket.owner, bucket.address, landing[: bucket.nbytes])
            memory.copy_(landing[: bucket.nbytes])
        self.device.synchronize()

    def check_stamp(self, owner: int, memory: torch.Tensor) -> None:
        """Read the stamp of `owner` into `memory`. Raises TransportError if it differs from that in the metas."""
        meta = self.metas[owner]
        self._read(owner, meta.stamp, memory)
        _, _, version = memory.view(torch.int64)[:3].tolist()
        if version != meta.incarnation:
            raise TransportError(
                f"rank {owner} at {meta.p2p_address} no longer holds the memory of the gathered metas: "
                "gather, or save, its metas again"
            )

    def _read(self, owner: int, source: int, memory: torch.Tensor) -> None:
        if not self.metas[owner].p2p_address:
            raise _unreadable(owner, f"rank {owner}")
        self.reader.read(self.metas[owner], source, memory, self.deadline.remaining_s, self.stop)


class LinkBuffers:
    """The halves of a link, in the order in which the engine frees them, for two threads.

    One thread broadcasts and offers halves to the engine; another fetches into one half at a time. The fetching thread
    has precedence, because a broadcast cannot overtake a bucket that has not been fetched.
    """

    def __init__(self, link: EngineLink, count: int, deadline: Deadline, failure: FirstFailure) -> None:
        self._link = link
        self._deadline = deadline
        self._failure = failure
        self._next = deque(range(count))
        self._reserved = 0
        self._changed = threading.Condition()
        self._all = [link.half(index) for index in range(count)]

    def try_take(self) -> int | None:
        """The index of a half that is free and not reserved, or None."""
        with self._changed:
            if len(self._next) > self._reserved and self._link.is_free(self._next[self._reserved]):
                return self._pop(self._reserved)
            return None

    def take(self) -> int:
        """Wait for a free half; its index. The broadcasting thread has offered all others. Raises the first failure."""
        with self._changed:
            self._await(lambda: len(self._next) > self._reserved)
            half = self._pop(self._reserved)
        self._link.await_free(half, self._deadline.remaining_s)
        return half

    def reserve(self) -> None:
        """Reserve the next free half for `take_reserved`."""
        with self._changed:
            self._reserved += 1

    def take_reserved(self) -> int:
        """Wait until a half has been offered and the engine has freed it; its index. Raises the first failure."""
        with self._changed:
            self._await(lambda: bool(self._next))
            half = self._pop(0)
            self._reserved -= 1
            self._changed.notify_all()
        self._link.await_free(half, self._deadline.remaining_s)
        return half

    def _pop(self, place: int) -> int:
        half = self._next[place]
        del self._next[place]
        return half

    def _await(self, there: Callable[[], bool]) -> None:
        while not there():
            self._failure.check()
            self._changed.wait(POLL_S)

    def memory(self, half: int, nbytes: int) -> torch.Tensor:
        return self._all[half][:nbytes]

    def offered(self, half: int) -> None:
        """Record that `half` has been offered to the engine."""
        with self._changed:
            self._next.append(half)
            self._changed.notify_all()

    def whole(self) -> list[torch.Tensor]:
        return self._all


class Fetcher:
    """Fetches this rank's buckets in order, each into a half. With `ahead` a thread fetches one in advance.

    Use as a context manager.
    """

    def __init__(
        self,
        sources: Sources,
        halves: LinkBuffers,
        buckets: Sequence[tuple[int, Bucket]],
        *,
        ahead: bool,
        events: Events,
        failure: FirstFailure,
    ) -> None:
        """`buckets`: (number, bucket) of each that this rank fetches.

        `ahead`: fetch the next one while others are broadcast.
        """
        self._sources = sources
        self._halves = halves
        self._buckets = deque(buckets)
        """The buckets whose advance fetch has not begun."""
        self._ahead = ahead
        self._events = events
        self._failure = failure
        self._peers = sorted({bucket.owner for _, bucket in buckets if not sources.is_own(bucket.owner)})
        self._stamp = torch.zeros(Stamp.NBYTES, dtype=torch.uint8)
        self._landing: torch.Tensor | None = None
        """On devices, the host memory for reads from peers."""
        if self._peers and sources.device.kind != "cpu":
            self._landing = pinned_memory(len(halves.whole()[0]))
        self._targets = ExitStack()
        """The registered targets of reads from peers."""
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="parameter-server-fetch")
        self._next: Future[int | None] | None = None
        """The half of the bucket that is being fetched ahead."""

    def __enter__(self) -> Self:
        if self._peers:
            places = [self._landing] if self._landing is not None else self._halves.whole()
            try:
                self._targets.enter_context(self._sources.reader.into([self._stamp, *places]))
            except BackendUnavailable as exc:
                raise _unreadable(self._peers[0], "this rank") from exc
        return self

    def start(self) -> None:
        """Check the owners' stamps and begin to fetch. Raises TransportError if an owner no longer holds its memory."""
        self.check_stamps()  # before there is a thread that reads, too
        if self._ahead:
            self._begin_next()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        if error is not None:  # ends what the thread may be waiting for
            self._failure.set(error)
        self._sources.stop.set()
        self._thread.shutdown()
        self._targets.close()

    def try_take(self) -> int | None:
        """The half with this rank's next bucket, if it has been fetched, or None."""
        return self._hand_over(self._next) if self._next is not None and self._next.done() else None

    def take(self, number: int, bucket: Bucket) -> int:
        """Wait for `bucket`, this rank's next; its half. Raises the first failure, TransportTimeout."""
        if self._next is None:
            return self._fetch(number, bucket, self._halves.take())
        # The thread waits for engine and owner, which it names, until the same deadline: it has the last word.
        end = time.monotonic() + self._sources.deadline.remaining_s + LAST_WORD_S
        while not wait([self._next], POLL_S).done:
            self._failure.check()
            if time.monotonic() > end:
                owner = self._sources.metas[bucket.owner]
                raise TransportTimeout(
                    f"bucket {number} of rank {bucket.owner} on {owner.host} not fetched within "
                    f"{self._sources.deadline.timeout_s:.1f} s"
                )
        return self._hand_over(self._next)

    def _hand_over(self, fetched: Future[int | None]) -> int:
        """The half that is ready; the next bucket is fetched while this one is broadcast."""
        half = fetched.result()
        if half is None:
            self._failure.check()
        assert half is not None
        self._begin_next()
        return half

    def check_stamps(self) -> None:
        """Raises TransportError if a peer has unregistered the checkpoint. Not to be called during a fetch."""
        for owner in self._peers:
            self._sources.check_stamp(owner, self._stamp)

    def _begin_next(self) -> None:
        self._next = None
        if self._buckets:
            self._halves.reserve()
            self._next = self._thread.submit(self._fetch_ahead, *self._buckets.popleft())

    def _fetch_ahead(self, number: int, bucket: Bucket) -> int | None:
        """None if it failed, which ends everything: a future would keep the error, and with it all of its frames."""
        try:
            return self._fetch(number, bucket, self._halves.take_reserved())
        except Exception as exc:  # noqa: BLE001 - raised in the thread that waits for the bucket
            self._failure.set(exc)
            return None

    def _fetch(self, number: int, bucket: Bucket, half: int) -> int:
        self._events.record("fetch-start", number)
        self._sources.fill(self._halves.memory(half, bucket.nbytes), bucket, self._landing)
        self._events.record("fetch-end", number)
        return half


def _unreadable(owner: int, who: str) -> TransportError:
    return TransportError(f"bytes of rank {owner} can only be read peer to peer, but {who} has no P2P store")
