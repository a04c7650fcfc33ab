"""Reads that are copies made by the thread that asks for them: what has arrived is digested while the cache has it."""

from __future__ import annotations

from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import xxhash

from verl.checkpoint_engine.digest import CACHED_NBYTES, PieceDigests
from verl.checkpoint_engine.errors import TransportError
from verl.checkpoint_engine.packed import Packing
from verl.checkpoint_engine.pipeline import Bucket
from verl.checkpoint_engine.plan import SyncPlan
from verl.checkpoint_engine.types import Range

if TYPE_CHECKING:
    from verl.checkpoint_engine.backends.one_sided import WireReader

MESSAGE_NBYTES = 8 * 2**20
"""The most in one bucket: between two of them a node notices that it is to stop. Small ones are shared out evenly."""


@dataclass(frozen=True, slots=True)
class Step:
    """A part of a bucket that is read at once, and then digested."""

    part: Range
    pieces: Sequence[tuple[int, int, int]]
    """Those that are complete then: row of the plan, offset in the slot, bytes."""


def steps_of(plan: SyncPlan, buckets: Iterable[Bucket]) -> dict[tuple[int, int], list[Step]]:
    """The steps of every bucket of `messages_of` that goes straight to a slot, by owner and place in its region. Pure.

    A step is at most `CACHED_NBYTES` long, or one piece. A piece that is larger than a bucket is complete in no step.
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
                yield Step(Range(begin, begin + shift, end - begin), complete)
                begin, complete = end, []
            if piece_start >= message.src_offset and piece_end <= stop:
                complete.append((piece, piece_start + shift, piece_end - piece_start))
            end = min(piece_end, stop)
        yield Step(Range(begin, begin + shift, stop - begin), complete)


@dataclass(frozen=True)
class CopyingReader:
    """The `RangeReader` over a wire that `copies`. It copies inside `is_done`, one step at a time.

    Two threads take turns in Python: what runs between a copy and its digest, and the next copy, is kept short.
    """

    reader: WireReader
    steps: Mapping[tuple[int, int], Sequence[Step]]
    arrived: PieceDigests
    """Filled in as pieces arrive. Scattered ones are not among them: they do not stay where they arrive."""

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
            for step in steps:
                part = step.part
                reading = wire.read(owner, source + part.src_offset, target + part.dst_offset, part.nbytes)
                while not wire.is_done(reading):
                    yield False
                for piece, offset, nbytes in step.pieces:
                    values[piece] = digest(slot[offset : offset + nbytes])
                    known[piece] = True
        except TransportError as exc:
            raise self.reader.located(exc, owner) from exc

    def cancel(self, transfer: Any) -> None:
        """The engine closes the wire after every failure; that ends this transfer with all others."""
