"""How forwarding nodes cut memory: into shares, one per node that reads from owners, and parts that travel alone."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from ..plan.shards import Int64s
from ..plan.sync_plan import SyncPlan
from ..plan.types import Range
from .fetch import Bucket
from .wire import UInt8s

UPSTREAM = -1
"""The owner index that means the upstream node, in wires and buckets."""
PARTS = 256
"""The number of parts of a slot, within the limits of their size. A hop delays a version by a few parts."""
LEAST_PART_NBYTES = 2**20
"""A read costs some hundred microseconds beside its bytes, and a node may notice a part a millisecond late."""


def part_nbytes_for(slot_nbytes: int, most_nbytes: int) -> int:
    """The bytes of a part of the slot, and of the buckets that fill it. Pure."""
    return min(max(-(-slot_nbytes // PARTS), LEAST_PART_NBYTES), most_nbytes)


def shares_of(plan: SyncPlan, num_receivers: int) -> list[Range]:
    """Cut the slot into `num_receivers` runs of about equal length, between pieces. Pure."""
    nbytes = plan.layout.nbytes
    starts = np.sort(plan.extents.offset)
    ends = np.maximum.accumulate(plan.extents.end[np.argsort(plan.extents.offset, kind="stable")])
    # Where a piece begins after all pieces before it have ended.
    possible = np.concatenate([[0], starts[1:][starts[1:] >= ends[:-1]], [nbytes]])
    wished = np.arange(num_receivers + 1) * nbytes // num_receivers
    after = np.clip(np.searchsorted(possible, wished), 1, len(possible) - 1)
    nearer = wished - possible[after - 1] < possible[after] - wished
    cuts = possible[after - nearer].tolist()
    return [Range(low, low, high - low) for low, high in zip(cuts[:-1], cuts[1:], strict=True)]


def parts_of(shares: Sequence[Range], part_nbytes: int) -> list[Bucket]:
    """Cut `shares` into parts of at most `part_nbytes`, as buckets from the upstream node. Pure."""
    return [
        Bucket(UPSTREAM, (Range(start, start, nbytes),), nbytes)
        for share in shares
        for start in range(share.dst_offset, share.dst_offset + share.nbytes, part_nbytes)
        for nbytes in [min(part_nbytes, share.dst_offset + share.nbytes - start)]
    ]


@dataclass(frozen=True)
class Cut:
    """The cut of memory that nodes forward. Every node computes the same one, but for `own`."""

    parts: Sequence[Bucket]
    shares: Int64s
    """The offsets at which the shares begin."""
    starts: Int64s
    """The offsets at which the parts begin."""
    own: Range | None
    """The share that this node reads from owners; None if it reads from none."""

    @classmethod
    def of(cls, shares: Sequence[Range], part_nbytes: int, own: int | None) -> Cut:
        """`own`: the index of this node's share, or None. Pure."""
        parts = parts_of(shares, part_nbytes)
        return cls(
            parts,
            np.array([share.dst_offset for share in shares], np.int64),
            np.array([part.ranges[0].dst_offset for part in parts], np.int64),
            shares[own] if own is not None else None,
        )


class InTurn:
    """A `Waiting`: buckets from owners in their order, and parts from the upstream node once that holds them."""

    def __init__(
        self,
        in_flight: int,
        own: Sequence[Bucket],
        parts: Sequence[Bucket] = (),
        passed: Sequence[int] = (),
        there: Callable[[], UInt8s] = lambda: np.zeros(0, np.uint8),
    ) -> None:
        """At most `in_flight` of each kind are under way. `passed` are the indices of the `parts` to fetch. `there`
        returns a byte per part; the upstream node holds a part if its byte is not 0."""
        self._in_flight = in_flight
        self._own, self._parts, self._there = deque(own), parts, there
        self._passed = np.array(passed, np.int64)

    def next(self, flying: Collection[Bucket]) -> Bucket | None:
        of_node = sum(bucket.owner == UPSTREAM for bucket in flying)
        if self._own and len(flying) - of_node < self._in_flight:
            return self._own[0]
        if len(self._passed) and of_node < self._in_flight:
            ready = np.flatnonzero(self._there()[self._passed])
            return self._parts[int(self._passed[ready[0]])] if len(ready) else None
        return None

    def remove(self, bucket: Bucket) -> None:
        if bucket.owner == UPSTREAM:
            self._passed = self._passed[[self._parts[number] is not bucket for number in self._passed.tolist()]]
        else:
            self._own.popleft()

    def __iter__(self) -> Iterator[Bucket]:
        yield from self._own
        yield from (self._parts[number] for number in self._passed.tolist())

    def __len__(self) -> int:
        return len(self._own) + len(self._passed)
