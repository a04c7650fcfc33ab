"""Reads over wires that copy on the calling thread: it digests each piece while the core's cache holds the bytes."""

from __future__ import annotations

from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import xxhash

from ..errors import TransportError
from ..memory.digest import CACHED_NBYTES, PieceDigests, digest_pieces
from ..memory.packed import Packing
from ..plan.shards import extents_of
from ..plan.sync_plan import SyncPlan
from ..plan.types import Range
from .fetch import Bucket
from .wire import WireReader

BUCKETS_PER_THREAD = 16
"""Buckets per thread: threads end at most one bucket apart, and check between two whether to stop."""
LEAST_NBYTES = 4 * 2**20
"""Bytes of a bucket: starting one takes about 90 microseconds of Python with a cold cache."""


def bucket_nbytes_for(payload_nbytes: int, threads: int) -> int:
    """The largest bucket when `threads` share `payload_nbytes`. Pure."""
    return max(payload_nbytes // (BUCKETS_PER_THREAD * threads), LEAST_NBYTES)


class Step(NamedTuple):
    """A part of a bucket that is read in one call, and then digested."""

    src_offset: int
    dst_offset: int
    nbytes: int
    pieces: Sequence[tuple[int, int, int]]
    """The pieces that this step completes: row in the plan, offset in the slot, bytes."""


def steps_of(plan: SyncPlan, buckets: Iterable[Bucket]) -> dict[tuple[int, int], list[Step]]:
    """The steps of every bucket of `messages_of` that is read into the slot, by (owner, offset in its region). Pure.

    A step is at most `CACHED_NBYTES` long, or one piece. No step completes a piece that is larger than a bucket.
    """
    packed: dict[int, _Packed] = {}
    steps: dict[tuple[int, int], list[Step]] = {}
    for bucket in buckets:
        if not bucket.scatter:
            if bucket.owner not in packed:
                packed[bucket.owner] = _Packed(Packing.of(plan, bucket.owner))
            (message,) = bucket.ranges
            steps[bucket.owner, message.src_offset] = list(packed[bucket.owner].steps(message))
    return steps


class _Packed:
    """An owner's pieces in the order in which they lie in its region."""

    def __init__(self, packing: Packing) -> None:
        rows = np.argsort(packing.offset, kind="stable")
        self._pieces, self._start = rows + packing.first, packing.offset[rows]
        self._end = self._start + packing.nbytes[rows]

    def steps(self, message: Range) -> Iterator[Step]:
        shift, stop = message.dst_offset - message.src_offset, message.src_offset + message.nbytes
        begin = end = message.src_offset
        complete: list[tuple[int, int, int]] = []
        touched = slice(np.searchsorted(self._end, begin, side="right"), np.searchsorted(self._start, stop))
        columns = (column[touched].tolist() for column in (self._pieces, self._start, self._end))
        for piece, piece_start, piece_end in zip(*columns, strict=True):
            if end > begin and min(piece_end, stop) - begin > CACHED_NBYTES:
                yield Step(begin, begin + shift, end - begin, complete)
                begin, complete = end, []
            if piece_start >= message.src_offset and piece_end <= stop:
                complete.append((piece, piece_start + shift, piece_end - piece_start))
            end = min(piece_end, stop)
        yield Step(begin, begin + shift, stop - begin, complete)


@dataclass(frozen=True)
class CopyingReader:
    """The `RangeReader` over a wire with `copies`. Each call of `is_done` copies and digests one step.

    Threads share Python's lock, so little Python runs between a copy, its digest and the next copy.
    """

    reader: WireReader
    plan: SyncPlan
    steps: Mapping[tuple[int, int], Sequence[Step]]
    arrived: PieceDigests
    """Receives the digest of each piece that arrives."""

    def start(self, owner: int, ranges: Sequence[Range], *, bounce: bool) -> Any:
        if bounce:
            return self.reader.start(owner, ranges, bounce=True)
        (message,) = ranges
        return self._copy(owner, self.steps[owner, message.src_offset])

    def is_done(self, transfer: Any) -> bool:
        if isinstance(transfer, Generator):
            return next(transfer, True)
        return self.reader.is_done(transfer)

    def _copy(self, owner: int, steps: Sequence[Step]) -> Generator[bool]:
        """Yields False while the copy of a step is not done."""
        wire, slot, digest = self.reader.wire, self.reader.slot.data, xxhash.xxh3_64_intdigest
        source, target = self.reader.owners[owner].region, self.reader.slot.ctypes.data
        values, known = self.arrived.values, self.arrived.known
        try:
            for src_offset, dst_offset, step_nbytes, pieces in steps:
                reading = wire.read(owner, source + src_offset, target + dst_offset, step_nbytes)
                while not wire.is_done(reading):
                    yield False
                for piece, offset, nbytes in pieces:
                    values[piece] = digest(slot[offset : offset + nbytes])
                    known[piece] = True
        except TransportError as exc:
            raise self.reader.located(exc, owner) from exc

    def digest_scattered(self, bucket: Bucket) -> None:
        """Digest the scattered pieces of `bucket`, in their rows of the slot. Does nothing for other buckets."""
        if bucket.scatter:
            pieces = np.asarray(bucket.scatter)
            extents = extents_of(self.plan.layout, self.plan.boxes.take(pieces))
            self.arrived.values[pieces] = digest_pieces(self.reader.slot, extents)
            self.arrived.known[pieces] = True

    def wait(self, timeout_s: float) -> None:
        self.reader.wait(timeout_s)

    def cancel(self, transfer: Any) -> None:
        """Does nothing: after a failure the engine abandons the wire and with it all transfers."""
