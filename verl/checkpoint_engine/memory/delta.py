"""The deltas of one owner's pieces, from one publication to the next: its rank makes them, nodes apply them.

    head       format, pieces, words of all streams, digest of the table
    table      4 bytes for each piece of the owner, in plan order: the number of its words, and their kind
    streams    the pieces' words, one after the other: nothing, a delta (`delta_codec.py`), or the piece itself
    padding    for a decoder that reads past the last word

Only a node that holds the owner's previous publication, byte for byte, may apply them: `identity_of` identifies it. The
node compares the result with the owner's digests, as for every version, so it notices any wrong delta.
"""

from __future__ import annotations

import ctypes
import logging
import mmap
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash

from ..errors import BackendUnavailable, TransportError
from ..plan.layout import align
from ..plan.shards import Int64s
from ..plan.sync_plan import SyncPlan
from .digest import PieceDigests, UInt64s

UInt8s = npt.NDArray[np.uint8]
FORMAT = 1
HEAD = 4
WORD = 8
PADDING = 8
"""Words of padding: `delta_codec.PADDING_NBYTES`."""
UNCHANGED, CHANGED, WHOLE = 0, 1, 2
LARGEST_SHARE = 2
"""A delta has at most one LARGEST_SHARE-th of the version's bytes: a larger one saves too little."""
EXPONENTS = {
    "bfloat16": (7, 255),
    "float16": (10, 31),
    "float32": (23, 255),
    "float64": (52, 2047),
    "float8_e4m3fn": (3, 15),
    "float8_e5m2": (2, 31),
}
"""The exponent in a word: (right shift in bits, mask after it)."""


def identity_of(plan: SyncPlan, owner: int, digests: UInt64s) -> int:
    """A number, never 0, that identifies the pieces of `owner` and their bytes. `digests`: of its pieces, in order."""
    content = xxhash.xxh3_64(plan.digest)
    content.update(owner.to_bytes(8, "little"))
    content.update(np.ascontiguousarray(digests).tobytes())
    return (content.intdigest() >> 1) | 1


def room_nbytes(region_nbytes: int, pieces: int) -> int:
    """The most bytes that the deltas of an owner take. Pure."""
    return align(WORD * (HEAD + PADDING) + 4 * (pieces + 1) + region_nbytes // LARGEST_SHARE)


def _table_words(pieces: int) -> int:
    return (pieces + 1) // 2


def codes_of(plan: SyncPlan, pieces: slice) -> Int64s:
    """[pieces, 3]: bytes of a word, shift and mask of its exponent. Pure."""
    kinds = {}
    for index, spec in enumerate(plan.layout.specs):
        itemsize = int(plan.layout.itemsizes[index])
        kinds[index] = (min(itemsize, WORD), *EXPONENTS.get(spec.dtype, (0, 0)))
    table = np.array([kinds[index] for index in range(len(kinds))], np.int64).reshape(-1, 3)
    return table[plan.boxes.tensor[pieces]]


logger = logging.getLogger(__name__)
_begun, _warm = threading.Event(), threading.Event()


def warm_up() -> None:
    """Compile the codec before it is needed, because that may take seconds. Idempotent.

    Raises BackendUnavailable if it cannot be compiled: numba is missing, or has no writable cache folder.
    """
    try:
        from . import delta_codec

        delta_codec.warm()
    except (ImportError, RuntimeError, OSError) as exc:
        raise BackendUnavailable(
            f"checkpoint_engine.delta: numba cannot compile it: {type(exc).__name__}: {exc}. Install numba, and set "
            "NUMBA_CACHE_DIR to a writable folder, or set checkpoint_engine.delta=off"
        ) from exc
    _warm.set()


def begin_to_warm_up() -> None:
    """Start `warm_up` on a thread. Until it ends, owners publish in full, and those syncs measure no rates."""
    if not _begun.is_set():
        _begun.set()
        threading.Thread(target=_warm_up_or_warn, name="weight-sync-warm-up", daemon=True).start()


def _warm_up_or_warn() -> None:
    try:
        warm_up()
    except BackendUnavailable as exc:
        logger.warning("versions are moved whole: %s", exc)


def is_warm() -> bool:
    return _warm.is_set()


class DeltaWriter:
    """Writes an owner's deltas into memory of its own, whose pages exist once written. Used by one thread at a time."""

    def __init__(self, plan: SyncPlan, owner: int, region_nbytes: int) -> None:
        pieces = plan.pieces_of(owner)
        self._pieces = len(pieces)
        self._codes = codes_of(plan, slice(pieces.start, pieces.stop)).tolist()
        memory = mmap.mmap(-1, room_nbytes(region_nbytes, len(pieces)), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self.bytes: UInt8s = np.frombuffer(memory, np.uint8)
        self._words: UInt64s = self.bytes.view(np.uint64)
        self._table = self._words[HEAD:].view(np.uint32)[: len(pieces)]
        self._first = HEAD + _table_words(len(pieces))
        self._scratch: tuple[Any, ...] = ()
        self._end = self._first
        self._is_full = False
        self.changed: Int64s = np.zeros(len(pieces), np.int64)
        """The number of words that the last deltas change, per piece."""

    def begin(self) -> None:
        self._end, self._is_full = self._first, False
        self._table[:] = 0
        self.changed[:] = 0

    def take(self, piece: int, new: int, old: int, nbytes: int) -> None:
        """Copy the piece at address `new` over the one at `old`; append its delta. `piece`: its index at the owner."""
        from . import delta_codec

        width = self._codes[piece][0]
        positions, before, differences, _ = self._scratch_for(nbytes // width)
        count = delta_codec.replace(new, old, nbytes, width, positions, before, differences)
        self._append(piece, count, new, nbytes)

    def take_changes(
        self, piece: int, positions: npt.NDArray[np.int32], words: npt.NDArray[Any], first: int, old: int, nbytes: int
    ) -> None:
        """As `take`, for known changes: `words` are the new values of the words numbered `positions` in a memory in
        which the piece begins with number `first`."""
        from . import delta_codec

        width = self._codes[piece][0]
        numbers, before, differences, _ = self._scratch_for(nbytes // width)
        delta_codec.replace_at(positions, words, first, old, width, numbers, before, differences)
        self._append(piece, len(positions), old, nbytes)

    def give_up(self) -> None:
        """Write no deltas for this publication: the changes are too many, or unknown."""
        self._is_full = True

    def _append(self, piece: int, count: int, new: int, nbytes: int) -> None:
        """The delta of a piece, which is now at address `new`, from the notes of its `count` changes."""
        from . import delta_codec

        self.changed[piece] = count
        if not count or self._is_full:
            return
        _, shift, mask = self._codes[piece]
        positions, before, differences, kinds = self._scratch
        out = self._words[self._end :]
        whole = -(-nbytes // WORD)
        room = len(out) - PADDING
        words = delta_codec.encode(count, positions, before, differences, kinds, shift, mask, out, min(whole, room))
        kind = CHANGED
        if words == delta_codec.TOO_LARGE:
            if whole > room:
                self._is_full = True
                return
            ctypes.memmove(out.ctypes.data, new, nbytes)
            words, kind = whole, WHOLE
        self._table[piece] = words << 2 | kind
        self._end += words

    def finish(self) -> int:
        """Write the head and return the bytes of the deltas; 0 if they did not fit or were given up."""
        if self._is_full:
            return 0
        self._words[:HEAD] = FORMAT, self._pieces, self._end - self._first, _digest_of(self._table)
        self._words[self._end : self._end + PADDING] = 0
        return WORD * (self._end + PADDING)

    def _scratch_for(self, words: int) -> tuple[Any, ...]:
        if not self._scratch or len(self._scratch[0]) < words:
            from . import delta_codec

            self._scratch = tuple(np.empty(words, kind) for kind in delta_codec.SCRATCH)
        return self._scratch


def _digest_of(table: npt.NDArray[np.uint32]) -> int:
    return int(xxhash.xxh3_64_intdigest(table.tobytes()))


@dataclass(frozen=True)
class Deltas:
    """The deltas of one owner, as a node has received them."""

    owner: int
    words: UInt64s
    starts: Int64s
    """Index in `words` of each piece's stream; `lengths` and `kinds` likewise per piece."""
    lengths: Int64s
    kinds: npt.NDArray[Any]

    @classmethod
    def parse(cls, plan: SyncPlan, owner: int, data: UInt8s) -> Deltas:
        """Read head and table. Raises TransportError for bytes that no `DeltaWriter` of this owner and plan wrote."""
        pieces, words = len(plan.pieces_of(owner)), data.view(np.uint64)
        first = HEAD + _table_words(pieces)
        problem = None
        if len(words) < first + PADDING:
            problem = f"{len(words)} words for {pieces} pieces"
        elif words[:2].tolist() != [FORMAT, pieces]:
            problem = f"format and pieces are {words[:2].tolist()}, not {[FORMAT, pieces]}"
        if problem is None:
            table = words[HEAD:].view(np.uint32)[:pieces]
            lengths, kinds = (table >> 2).astype(np.int64), table & 3
            total = int(lengths.sum())
            if _digest_of(table) != int(words[3]):
                problem = "their table is not what was written"
            elif total != int(words[2]) or first + total + PADDING != len(words) or int(kinds.max(initial=0)) > WHOLE:
                problem = f"their {total} words are not what the head says"
            else:
                return cls(owner, words, first + np.cumsum(lengths) - lengths, lengths, kinds)
        raise TransportError(f"no deltas can be read: {problem}", phase="stage", member=f"trainer-{owner}")


@dataclass(frozen=True)
class Applier:
    """Makes the new version of pieces from the base and deltas, and digests each while the core's cache holds it."""

    plan: SyncPlan
    base: UInt8s
    """The memory of the base's slot; it may be `slot` itself."""
    slot: UInt8s
    arrived: PieceDigests

    def apply(self, deltas: Sequence[Deltas], *, threads: int, stopped: Callable[[], bool]) -> list[int]:
        """Write the pieces into `slot` and their digests into `arrived`. Returns the rows of pieces that failed.

        The content of a failed piece is undefined. Once `stopped`, it ends early, with pieces unknown to `arrived`.
        """
        work = []
        for one in deltas:
            pieces = self.plan.pieces_of(one.owner)
            bounds = np.linspace(0, len(pieces), threads + 1).astype(int).tolist()
            work += [(one, range(low, high)) for low, high in zip(bounds[:-1], bounds[1:], strict=True)]
        if threads == 1:
            found = [self._apply(one, rows, stopped) for one, rows in work]
        else:
            with ThreadPoolExecutor(threads, thread_name_prefix="weight-sync-delta") as pool:
                found = list(pool.map(lambda part: self._apply(part[0], part[1], stopped), work))
        return [piece for part in found for piece in part]

    def _apply(self, deltas: Deltas, rows: range, stopped: Callable[[], bool]) -> list[int]:
        pieces, plan = self.plan.pieces_of(deltas.owner), self.plan
        part = slice(pieces.start + rows.start, pieces.start + rows.stop)
        codes = codes_of(plan, part).tolist()
        extents = plan.extents.of(range(part.start, part.stop))
        values, known = self.arrived.values, self.arrived.known
        wrong: list[int] = []
        for row, (width, shift, mask), extent in zip(rows, codes, extents, strict=True):
            if stopped():
                return wrong
            made = self._make(deltas, row, (width, shift, mask), extent)
            piece = pieces.start + row
            if made is None:
                wrong.append(piece)
            else:
                values[piece], known[piece] = made, True
        return wrong

    def _make(
        self, deltas: Deltas, row: int, code: tuple[int, int, int], extent: tuple[int, int, int, int]
    ) -> int | None:
        """The digest of the piece, once the slot has it; None if that cannot be."""
        from . import delta_codec

        offset, run_nbytes, rows, stride = extent
        nbytes, kind = run_nbytes * rows, int(deltas.kinds[row])
        start, length = int(deltas.starts[row]), int(deltas.lengths[row])
        if rows == 1:
            target = self.slot[offset : offset + nbytes]
        else:
            runs = np.lib.stride_tricks.as_strided(self.slot[offset:], (rows, run_nbytes), (stride, 1))
            target = np.empty(nbytes, np.uint8)
        if kind == WHOLE:
            if length * WORD < nbytes:
                return None
            target[:] = deltas.words[start : start + length].view(np.uint8)[:nbytes]
        elif rows == 1:
            source, here = self.base.ctypes.data + offset, self.slot.ctypes.data + offset
            if source != here:
                ctypes.memmove(here, source, nbytes)
        else:
            before = np.lib.stride_tricks.as_strided(self.base[offset:], (rows, run_nbytes), (stride, 1))
            target.reshape(rows, run_nbytes)[:] = before
        if kind == CHANGED:
            words, address = deltas.words.ctypes.data + WORD * start, target.ctypes.data
            if delta_codec.decode(words, length, address, nbytes, *code) == delta_codec.BAD:
                return None
        if rows > 1:
            runs[:] = target.reshape(rows, run_nbytes)
        return xxhash.xxh3_64_intdigest(target.data)
