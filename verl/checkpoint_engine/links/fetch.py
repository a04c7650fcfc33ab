"""The fetch loop of all backends, and the buckets that it fetches. A backend supplies the wire."""

from __future__ import annotations

import threading
import time
from array import array
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, TypeVar

import numpy as np
import numpy.typing as npt

from ..errors import TransportError, TransportTimeout
from ..memory.packed import Packing
from ..plan.layout import align
from ..plan.shards import extents_of
from ..plan.sync_plan import SyncPlan
from ..plan.types import Range
from .traffic import Traffic

T = TypeVar("T")


@dataclass(frozen=True)
class Bucket:
    """A batch of ranges from one owner's packed region into the slot or, for strided pieces, into a bounce buffer."""

    owner: int
    ranges: tuple[Range, ...]
    nbytes: int
    scatter: Sequence[int] = ()
    """Rows in the plan of pieces that arrive packed in the bounce buffer and are then copied to the slot."""


def messages_of(plan: SyncPlan, owner: int, bucket_nbytes: int, within: Range | None = None) -> list[Bucket]:
    """The pieces of `owner` in buckets of exactly one range, for wires whose messages are one run of bytes. Pure.

    Long runs are read into the slot, cut between pieces, or inside a piece larger than `bucket_nbytes`. The tail of
    the packed region goes through the bounce buffer, in parts of at most `bucket_nbytes` (or one piece).
    `within`: only pieces in this part of the slot, which begins and ends between pieces.
    """
    packing = Packing.of(plan, owner)
    inside = np.ones(len(packing.offset), bool)
    if within is not None:
        places = packing.extents.offset
        inside = (places >= within.dst_offset) & (places < within.dst_offset + within.nbytes)
    buckets = [Bucket(owner, (part,), part.nbytes) for part in _straight_parts(packing, inside, bucket_nbytes)]
    rows = np.flatnonzero(inside & (packing.offset >= packing.tail_offset))
    rows = rows[np.argsort(packing.offset[rows], kind="stable")]
    starts = packing.offset[rows]
    ends = starts + packing.nbytes[rows]
    first = 0
    while first < len(rows):
        start = int(starts[first])
        last = max(int(np.searchsorted(ends, start + bucket_nbytes, side="right")), first + 1)
        pieces = rows[first:last]
        whole = Range(start, 0, int(ends[last - 1]) - start)
        payload = int(packing.nbytes[pieces].sum())
        # An array of machine integers: a node has a bucket for every piece of the model.
        buckets.append(Bucket(owner, (whole,), payload, array("q", (pieces + packing.first).tobytes())))
        first = last
    return buckets


def pieces_again(plan: SyncPlan, pieces: Sequence[int]) -> list[Bucket]:
    """One bucket for each of `pieces` (rows in the plan), of the form of `messages_of`. Pure."""
    packings: dict[int, Packing] = {}
    buckets = []
    for piece in pieces:
        owner = plan.owner_of(piece)
        if owner not in packings:
            packings[owner] = Packing.of(plan, owner)
        packing = packings[owner]
        row = piece - packing.first
        source, nbytes = int(packing.offset[row]), int(packing.nbytes[row])
        if int(packing.extents.rows[row]) == 1:
            straight = Range(source, int(packing.extents.offset[row]), nbytes)
            buckets.append(Bucket(owner, (straight,), nbytes))
        else:
            buckets.append(Bucket(owner, (Range(source, 0, nbytes),), nbytes, array("q", [piece])))
    return buckets


def moved_to(bucket: Bucket, shift: int) -> Bucket:
    """A bucket of `messages_of` with its place in the slot moved by `shift` bytes. Pure."""
    if bucket.scatter:
        return bucket
    (part,) = bucket.ranges
    return replace(bucket, ranges=(Range(part.src_offset, part.dst_offset + shift, part.nbytes),))


def spread_over_bounce(buckets: Sequence[Bucket], parts: int) -> list[Bucket]:
    """Give scattered `buckets` of `messages_of` one of `parts` places in the bounce buffer, by turns. Pure.

    Up to `parts` of them can then be under way at the same time.
    """
    stride = align(max((bucket.ranges[0].nbytes for bucket in buckets if bucket.scatter), default=0))
    spread, turn = [], 0
    for bucket in buckets:
        if bucket.scatter:
            (part,) = bucket.ranges
            bucket = replace(bucket, ranges=(Range(part.src_offset, turn % parts * stride, part.nbytes),))
            turn += 1
        spread.append(bucket)
    return spread


def bounce_nbytes(buckets: Iterable[Bucket]) -> int:
    """The bytes of the bounce buffer that `buckets` need."""
    scattered = (bucket.ranges[0] for bucket in buckets if bucket.scatter)
    return max((part.dst_offset + part.nbytes for part in scattered), default=0)


def _straight_parts(packing: Packing, inside: npt.NDArray[np.bool_], most_nbytes: int) -> Iterator[Range]:
    """The head of the packed region in parts, those pieces that are `inside`: where each belongs in the slot."""
    rows = np.flatnonzero(inside & (packing.offset < packing.tail_offset))
    if not len(rows):
        return
    rows = rows[np.argsort(packing.offset[rows], kind="stable")]
    source, nbytes = packing.offset[rows], packing.nbytes[rows]
    target, ends = packing.extents.offset[rows], source + nbytes
    follows = (source[1:] == ends[:-1]) & (target[1:] == target[:-1] + nbytes[:-1])
    first = np.flatnonzero(np.concatenate([[True], ~follows]))
    last = np.append(first[1:], len(rows)) - 1
    runs = (column.tolist() for column in (source[first], ends[last], target[first] - source[first]))
    for start, end, shift in zip(*runs, strict=True):
        while start < end:
            limit = min(start + most_nbytes, end)
            fitting = int(np.searchsorted(ends, limit, side="right"))
            cut = int(ends[fitting - 1]) if fitting else start
            if cut <= start:
                cut = limit
            yield Range(start, start + shift, cut - start)
            start = cut


class BounceBuffer:
    """Copies scattered pieces between a slot and the bounce buffer, where they are packed as in the owner's region."""

    def __init__(self, plan: SyncPlan | None, bounce: npt.NDArray[np.uint8], origin: int = 0) -> None:
        """`plan`: None if no bucket is scattered. `origin`: the offset in the slot of the memory passed as `slot`."""
        self._plan = plan
        self._bounce = bounce
        self._origin = origin
        self._packings: dict[int, Packing] = {}

    def scatter(self, bucket: Bucket, slot: npt.NDArray[np.uint8]) -> None:
        """Copy the pieces of `bucket` from the bounce buffer to their rows."""
        for arrived, rows in self._places(bucket, slot):
            rows[:] = arrived

    def gather(self, bucket: Bucket, slot: npt.NDArray[np.uint8]) -> None:
        """Copy the pieces of `bucket` from their rows to the bounce buffer."""
        for leaving, rows in self._places(bucket, slot):
            leaving[:] = rows

    def _places(
        self, bucket: Bucket, slot: npt.NDArray[np.uint8]
    ) -> Iterator[tuple[npt.NDArray[np.uint8], npt.NDArray[np.uint8]]]:
        """Each scattered piece of `bucket`: its bytes in the bounce buffer, and its rows in the slot."""
        if not bucket.scatter:
            return
        assert self._plan is not None
        if bucket.owner not in self._packings:
            self._packings[bucket.owner] = Packing.of(self._plan, bucket.owner)
        packing = self._packings[bucket.owner]
        pieces = np.asarray(bucket.scatter)
        extents = extents_of(self._plan.layout, self._plan.boxes.take(pieces))
        message = bucket.ranges[0]
        positions = packing.offset[pieces - packing.first] - message.src_offset + message.dst_offset
        starts = extents.offset - self._origin
        columns = (positions, starts, extents.run_nbytes, extents.rows, extents.stride)
        for position, offset, run_nbytes, rows, stride in zip(*(column.tolist() for column in columns), strict=True):
            part = self._bounce[position : position + rows * run_nbytes]
            if rows == 1:
                yield part, slot[offset : offset + run_nbytes]
            else:
                target = np.lib.stride_tricks.as_strided(slot[offset:], (rows, run_nbytes), (stride, 1))
                yield part.reshape(rows, run_nbytes), target


STALLED_S = 0.5
"""After this time without a bucket, a loop reports the owners that it waits for."""
STOPPED_S = 0.01
"""A waiting loop checks its stop and its deadline at least this often."""


class RangeReader(Protocol):
    """One-sided reads from the packed regions of trainer ranks. Called from one thread.

    A transfer belongs to the version for which it was started; a reader never reports one of another version as done.
    """

    def start(self, owner: int, ranges: Sequence[Range], *, bounce: bool) -> Any:
        """Begin to read `ranges` of the owner's region into the slot or the bounce buffer. Raises TransportError."""

    def is_done(self, transfer: Any) -> bool:
        """Whether every byte has arrived. Raises TransportError if the transfer failed."""

    def wait(self, timeout_s: float) -> None:
        """Return when a transfer may be done, after `timeout_s`, or earlier."""

    def cancel(self, transfer: Any) -> None:
        """Cancel the transfer. If the transport can, it does not write to the memory after this returns."""


class Stop(Protocol):
    def is_set(self) -> bool: ...


@dataclass(frozen=True)
class _AnyOf:
    stops: tuple[Stop, ...]

    def is_set(self) -> bool:
        return any(stop.is_set() for stop in self.stops)


@dataclass
class _Flight:
    bucket: Bucket
    transfer: Any


class Waiting(Protocol):
    """The buckets that a loop has not started, and their order."""

    def next(self, flying: Collection[Bucket]) -> Bucket | None:
        """The bucket to start beside those that are `flying`; None if none may start now."""

    def remove(self, bucket: Bucket) -> None:
        """Remove `bucket`, which `next` returned and the loop has started."""

    def __iter__(self) -> Iterator[Bucket]: ...

    def __len__(self) -> int: ...


class InOrder:
    """Starts buckets in their order: members of a collective that start them in different orders deadlock."""

    def __init__(self, buckets: Iterable[Bucket], max_in_flight: int) -> None:
        self._buckets = deque(buckets)
        self._max_in_flight = max_in_flight

    def next(self, flying: Collection[Bucket]) -> Bucket | None:
        return self._buckets[0] if self._buckets and len(flying) < self._max_in_flight else None

    def remove(self, bucket: Bucket) -> None:
        self._buckets.popleft()

    def __iter__(self) -> Iterator[Bucket]:
        return iter(self._buckets)

    def __len__(self) -> int:
        return len(self._buckets)


@dataclass
class FetchLoop:
    """Fetches buckets of one version, several in flight, at most `bucket_nbytes` per owner at a time."""

    reader: RangeReader
    plan: SyncPlan | None
    """None if no bucket is scattered."""
    region: npt.NDArray[np.uint8]
    """The slot, or a part of it that begins at `origin`."""
    bounce: npt.NDArray[np.uint8]
    """Receives strided buckets, at the `dst_offset` of their range; one at a time per offset."""
    version: int
    timeout_s: float
    """The time for all buckets, from the construction of this loop."""
    stop: Stop = field(default_factory=threading.Event)
    """Another thread sets it to end the loop."""
    max_in_flight: int = 8
    interleave: bool = True
    """Whether `run` alternates between owners. Otherwise it fetches buckets in the order given."""
    on_bucket: Callable[[Bucket], None] = field(default=lambda bucket: None)
    origin: int = 0
    """The offset in the slot at which `region` begins."""
    name_of: Callable[[int], str] = field(default=lambda owner: f"trainer-{owner}")
    on_stall: Callable[[Collection[int]], None] = field(default=lambda owners: None)
    """Called repeatedly while nothing arrives, with the owners that the loop waits for."""
    clock: Callable[[], float] = time.monotonic
    """The clock of the deadline, in seconds."""

    traffic: Traffic = field(default_factory=Traffic)

    def __post_init__(self) -> None:
        self._deadline = self.clock() + self.timeout_s

    def run(self, buckets: Sequence[Bucket]) -> int:
        """Fetch `buckets`; return their bytes. Raises TransportTimeout naming the owners that it waited for, or the
        reader's TransportError; no transfer is in flight then."""
        ordered = by_turns(buckets, lambda bucket: bucket.owner) if self.interleave else buckets
        return self.fetch(InOrder(ordered, self.max_in_flight))

    def fetch(self, waiting: Waiting) -> int:
        """As `run`; `waiting` decides the order."""
        bounced = BounceBuffer(self.plan, self.bounce, self.origin)
        flying: list[_Flight] = []
        landed_s = self.clock()
        done: dict[int, int] = {bucket.owner: 0 for bucket in waiting}
        try:
            while waiting or flying:
                self._raise_if_stopped()
                self._take_off(waiting, flying)
                landed = [flight for flight in flying if self.reader.is_done(flight.transfer)]
                for flight in landed:
                    flying.remove(flight)
                    self.traffic.end(flight.bucket.owner, flight.bucket.nbytes)
                    bounced.scatter(flight.bucket, self.region)
                    done[flight.bucket.owner] += flight.bucket.nbytes
                    self.on_bucket(flight.bucket)
                if landed:
                    landed_s = self.clock()
                else:
                    if self.clock() - landed_s > STALLED_S:
                        self.on_stall(_awaited(flying, waiting))
                    self._check_deadline(flying, waiting, done)
                    self.reader.wait(STOPPED_S)
        except BaseException:
            for flight in flying:
                self.reader.cancel(flight.transfer)
            raise
        return sum(done.values())

    def _take_off(self, waiting: Waiting, flying: list[_Flight]) -> None:
        """Start what may be started: no two strided buckets fly to the same place of the bounce buffer."""
        taken = {flight.bucket.ranges[0].dst_offset for flight in flying if flight.bucket.scatter}
        while (bucket := waiting.next([flight.bucket for flight in flying])) is not None:
            if bucket.scatter:
                if bucket.ranges[0].dst_offset in taken:
                    return
                taken.add(bucket.ranges[0].dst_offset)
            waiting.remove(bucket)
            self.traffic.begin(bucket.owner)
            transfer = self.reader.start(bucket.owner, bucket.ranges, bounce=bool(bucket.scatter))
            flying.append(_Flight(bucket, transfer))

    def _raise_if_stopped(self) -> None:
        if self.stop.is_set():
            raise TransportError("given up by the manager", version=self.version, phase="stage")

    def _check_deadline(self, flying: Sequence[_Flight], waiting: Iterable[Bucket], done: dict[int, int]) -> None:
        if self.clock() < self._deadline:
            return
        late = _awaited(flying, waiting)
        behind = {bucket.owner for bucket in waiting} - late
        message = f"bytes of {self._names(late)} not here within {self.timeout_s:.1f} s"
        if behind:
            message += f"; held up behind them: {self._names(behind)}"
        raise TransportTimeout(
            f"{message}; done: {self._names(done.keys() - late - behind)}", version=self.version, phase="stage"
        )

    def _names(self, owners: Collection[int]) -> str:
        return ", ".join(map(self.name_of, sorted(owners))) or "none"


def run_together(loops: Sequence[FetchLoop], buckets: Sequence[Bucket]) -> int:
    """Fetch `buckets` with all loops, each on a thread of its own; return the bytes that all fetched together.

    `spread_over_bounce` must have given scattered buckets as many places as there are loops: each loop fetches those of
    one place. The next idle loop fetches the next other bucket. When a loop fails, the others stop. Raises the first
    loop's error; no transfer is in flight then.
    """
    scattered = [bucket for bucket in buckets if bucket.scatter]
    straight = sorted((bucket for bucket in buckets if not bucket.scatter), key=lambda bucket: -bucket.nbytes)
    left, failed = iter(straight), threading.Event()

    def work(loop: FetchLoop, share: Sequence[Bucket]) -> int:
        return loop.run(share) + sum(loop.run([bucket]) for bucket in left)

    moved = 0
    with ThreadPoolExecutor(len(loops), thread_name_prefix="weight-sync-fetch") as pool:
        for loop in loops:
            loop.stop = _AnyOf((loop.stop, failed))
        running = [pool.submit(work, loop, scattered[turn :: len(loops)]) for turn, loop in enumerate(loops)]
        ended: Future[int] | None = None
        try:
            for ended in as_completed(running):
                moved += ended.result()
        except BaseException:
            failed.set()
            raise
        finally:  # an error that its own traceback refers to keeps the slot mapped until a garbage collection
            running.clear()
            ended = None
    return moved


def _awaited(flying: Sequence[_Flight], waiting: Iterable[Bucket]) -> set[int]:
    """The owners that are waited for: of what is under way, or of what may not even be started."""
    return {flight.bucket.owner for flight in flying} or {bucket.owner for bucket in waiting}


def by_turns(items: Iterable[T], sender: Callable[[T], Any]) -> Iterator[T]:
    """Order `items` so that senders alternate and all are busy from the start; the order of each stays. Pure."""
    queues: dict[Any, deque[T]] = {}
    for item in items:
        queues.setdefault(sender(item), deque()).append(item)
    while queues:
        for key in list(queues):
            yield queues[key].popleft()
            if not queues[key]:
                del queues[key]
