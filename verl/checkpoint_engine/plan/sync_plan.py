"""The plan of a sync: it cuts the shards of all trainer ranks into pieces with one owner each. No torch, no I/O.

    shards of each rank -> ShardTable -> prove that they cover the model once -> pieces <= block -> one owner per piece

All data are columns of numpy arrays, because a trillion-parameter model on 256 ranks has millions of shards. Tensors
are planned in batches, so that temporary columns exist for one batch only.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
import xxhash

from ..errors import PlanError
from .encoded import UNREADABLE, deflated, inflated
from .layout import Layout, listed
from .owners import Holders, assign
from .shards import Extents, Int64s, ShardTable, extents_of
from .types import Box, Shard

Int32s = npt.NDArray[np.int32]

MOST_LAYOUT_NBYTES = 2**27
"""Bytes of an encoded layout: one of a trillion parameters in 70,000 tensors has 5 MB."""
BATCH_ROWS = 2**18
"""About as many shards are planned at a time; those of one tensor always together.

2**21 was measured to take a third longer.
"""


@dataclass(frozen=True)
class SyncPlan:
    """The pieces of one version: each lies in one tensor, is at most a block long, and is sent by one owner.

    Pieces are sorted by owner, then by offset. `first[r]:first[r + 1]` are those of trainer rank r.
    """

    layout: Layout
    boxes: ShardTable
    first: Int64s

    def __len__(self) -> int:
        return len(self.boxes)

    @property
    def num_owners(self) -> int:
        return len(self.first) - 1

    @cached_property
    def extents(self) -> Extents:
        """The extents of all pieces, for members that handle them all. 32 bytes per piece."""
        return extents_of(self.layout, self.boxes)

    @cached_property
    def digest(self) -> bytes:
        """16 bytes that differ when any tensor, piece or owner differs. They do not depend on the host's zlib."""
        found = xxhash.xxh3_128(self.layout.digest.encode())
        for column in (self.first, self.boxes.tensor, self.boxes.start, self.boxes.stop):
            for low in range(0, len(column), BATCH_ROWS):
                found.update(column[low : low + BATCH_ROWS].astype("<i8").tobytes())
        return found.digest()

    def extents_of(self, owner: int) -> Extents:
        """The extents of the pieces of `owner` alone."""
        return extents_of(self.layout, self.boxes.take(self._part(owner)))

    def owner_of(self, piece: int) -> int:
        return int(np.searchsorted(self.first, piece, side="right")) - 1

    def pieces_of(self, owner: int) -> range:
        return range(int(self.first[owner]), int(self.first[owner + 1]))

    def shards_of(self, owner: int) -> list[Shard]:
        """The pieces of `owner` as shards: tensor name and box."""
        part = self.boxes.take(self._part(owner))
        shards = []
        columns = (part.tensor.tolist(), part.start.tolist(), part.stop.tolist())
        for tensor, start, stop in zip(*columns, strict=True):
            spec = self.layout.specs[tensor]
            ndim = len(spec.shape)
            shards.append(Shard(spec.name, Box(tuple(start[:ndim]), tuple(stop[:ndim]))))
        return shards

    def nbytes_of(self, owner: int) -> int:
        return self.owner_nbytes[owner]

    @cached_property
    def owner_nbytes(self) -> tuple[int, ...]:
        """The bytes that each owner sends of a version."""
        owners = range(self.num_owners)
        return tuple(int(_nbytes(self.layout, self.boxes.take(self._part(owner))).sum()) for owner in owners)

    def describe(self, piece: int) -> str:
        """The piece in words, for messages: `model.norm.weight[0:896] (bytes 1024..2816, from trainer-1)`."""
        spec = self.layout.specs[int(self.boxes.tensor[piece])]
        box = self.boxes.box(piece, len(spec.shape))
        span = ", ".join(f"{low}:{high}" for low, high in zip(box.start, box.stop, strict=True))
        ((offset, run_nbytes, rows, stride),) = extents_of(self.layout, self.boxes.take(slice(piece, piece + 1))).of(
            range(1)
        )
        end = offset + (rows - 1) * stride + run_nbytes
        return f"{spec.name}[{span}] (bytes {offset}..{end}, from trainer-{self.owner_of(piece)})"

    def _part(self, owner: int) -> slice:
        return slice(int(self.first[owner]), int(self.first[owner + 1]))

    def encode(self) -> bytes:
        return self._encoded

    @cached_property
    def _encoded(self) -> bytes:
        layout = deflated(self.layout.encode())
        return msgspec.msgpack.encode([layout, self.first.tolist(), self.boxes.columns()])

    @classmethod
    def decode(cls, data: bytes) -> SyncPlan:
        """Undo `encode`. Raises PlanError for other bytes."""
        try:
            encoded_layout, first, columns = msgspec.msgpack.decode(data, type=tuple[bytes, list[int], list[Any]])
            boxes = ShardTable.from_columns(columns)
            bounds = np.array(first, np.int64)
            plain_layout = inflated(encoded_layout, MOST_LAYOUT_NBYTES)
        except UNREADABLE as exc:
            raise PlanError(f"not an encoded plan: {exc}") from exc
        if not len(bounds) or bounds[0] != 0 or bounds[-1] != len(boxes) or (np.diff(bounds) < 0).any():
            raise PlanError(f"not an encoded plan: pieces of owners begin at {first[:8]}, {len(boxes)} in all")
        layout = Layout.decode(plain_layout)
        boxes.require_inside(layout)
        return cls(layout, boxes, bounds)


def make_plan(layout: Layout, held: Sequence[ShardTable], *, block_nbytes: int) -> SyncPlan:
    """The plan for trainer ranks with the shards `held[rank]`.

    The pieces of a box that several ranks hold are divided among these ranks, so that ranks send about equal bytes.
    Raises PlanError, listing every tensor, unless the boxes cover each byte of the layout exactly once.
    """
    tables = [_by_tensor(table) for table in held]
    sets = _HolderSets([(rank,) for rank in range(len(held))])
    missing: list[str] = []
    overlapping: list[str] = []
    batches: list[_Batch] = []
    for tensors in _batches(layout, tables):
        boxes, holders = _unique_boxes(layout, tables, tensors, sets)
        missing += _missing(layout, boxes, tensors)
        overlapping += _overlapping(layout, boxes, tensors)
        if not missing and not overlapping:
            batches.append(_pieces(layout, boxes, holders, block_nbytes))
    problems = missing + overlapping
    if problems:
        raise PlanError(f"{len(problems)} tensors are not covered exactly once: {listed(problems)}")
    _choose_owners(layout, batches, sets.members, len(held))
    return _sorted_by_owner(layout, batches, len(held))


@dataclass
class _Batch:
    """Some pieces in the order of their offsets."""

    boxes: ShardTable
    owner: Int32s
    """Until owners are chosen: the index of the set of ranks that hold the piece."""


@dataclass
class _HolderSets:
    """The distinct sets of ranks that hold a box. The first ones are those of one rank: rank r is number r."""

    members: list[Holders]
    _numbers: dict[Holders, int] = field(default_factory=dict)

    def number(self, holders: Holders) -> int:
        if len(holders) == 1:
            return holders[0]
        if holders not in self._numbers:
            self._numbers[holders] = len(self.members)
            self.members.append(holders)
        return self._numbers[holders]


def _by_tensor(table: ShardTable) -> ShardTable:
    if (table.tensor[1:] >= table.tensor[:-1]).all():
        return table
    return table.take(np.argsort(table.tensor, kind="stable"))


def _batches(layout: Layout, tables: Sequence[ShardTable]) -> Iterator[range]:
    """Consecutive tensors with about BATCH_ROWS shards together."""
    shards = np.zeros(len(layout.specs), np.int64)
    for table in tables:
        shards += np.bincount(table.tensor, minlength=len(layout.specs))
    end = np.cumsum(shards)
    low, done = 0, 0
    while low < len(end):
        high = max(int(np.searchsorted(end, done + BATCH_ROWS, side="right")), low + 1)
        yield range(low, high)
        low, done = high, int(end[high - 1])


def _unique_boxes(
    layout: Layout, tables: Sequence[ShardTable], tensors: range, sets: _HolderSets
) -> tuple[ShardTable, Int32s]:
    """Every distinct non-empty box of `tensors` once, by offset, and the number of the set of ranks that hold it."""
    bounds = [np.searchsorted(table.tensor, (tensors.start, tensors.stop)).tolist() for table in tables]
    rank = np.repeat(np.arange(len(tables), dtype=np.int32), [high - low for low, high in bounds])
    parts = [table.take(slice(low, high)) for table, (low, high) in zip(tables, bounds, strict=True)]
    table = ShardTable(
        np.concatenate([part.tensor for part in parts]),
        np.concatenate([part.start for part in parts]),
        np.concatenate([part.stop for part in parts]),
    )
    filled = (table.stop > table.start).all(axis=1)
    if not filled.all():
        table, rank = table.take(np.flatnonzero(filled)), rank[filled]
    # A box of a tensor is known by the places of its first and its last element.
    first, last = _corners(layout, table)
    order = np.argsort(first, kind="stable")
    if (np.diff(first[order]) == 0).any():
        order = np.lexsort((last, first))
    first, last, rank = first[order], last[order], rank[order]
    new = np.ones(len(order), bool)
    new[1:] = (first[1:] != first[:-1]) | (last[1:] != last[:-1])
    if new.all():
        return table.take(order), rank
    return table.take(order[new]), _numbers_of_sets(rank, new, sets)


def _corners(layout: Layout, boxes: ShardTable) -> tuple[Int64s, Int64s]:
    """Where the first and the last element of each box lie in the region."""
    strides, base = layout.strides[boxes.tensor], layout.bases[boxes.tensor]
    first, last = base, base.copy()
    for dim in range(strides.shape[1]):
        first = first + strides[:, dim] * boxes.start[:, dim]
        last += strides[:, dim] * (boxes.stop[:, dim] - 1)
    return first, last


def _numbers_of_sets(rank: Int32s, new: npt.NDArray[np.bool_], sets: _HolderSets) -> Int32s:
    """`rank` has the holders of one box after those of another, ascending; `new` where another box begins."""
    again = np.zeros(len(rank), bool)
    again[1:] = ~new[1:] & (rank[1:] == rank[:-1])  # a rank that lists a box twice
    rank, new = rank[~again], new[~again]
    first = np.flatnonzero(new)
    # Sets are compared by the sum of a random number per rank; two of a million agree with a chance of 1 in 10 million.
    salt = np.random.default_rng(0).integers(2**63, size=int(rank.max()) + 1, dtype=np.uint64)
    _, example, kind = np.unique(np.add.reduceat(salt[rank], first), return_index=True, return_inverse=True)
    end = np.append(first[1:], len(rank))
    numbers = [sets.number(tuple(rank[first[box] : end[box]].tolist())) for box in example.tolist()]
    return np.array(numbers, np.int32)[kind.reshape(-1)]


def _missing(layout: Layout, boxes: ShardTable, tensors: range) -> list[str]:
    """The tensors of which some elements are in no box."""
    numel = np.prod(boxes.stop - boxes.start, axis=1, dtype=np.int64)
    covered = np.zeros(len(tensors), np.int64)
    np.add.at(covered, boxes.tensor - tensors.start, numel)
    needed = layout.shapes[tensors.start : tensors.stop].prod(axis=1)
    return [
        f"{layout.specs[tensors[row]].name}: {needed[row] - covered[row]} of {needed[row]} elements held by nobody"
        for row in np.flatnonzero(covered < needed).tolist()
    ]


def _overlapping(layout: Layout, boxes: ShardTable, tensors: range) -> list[str]:
    """Tensors with two boxes that share an element. Contiguous boxes are intervals; others are compared in pairs."""
    first, last = _corners(layout, boxes)
    simple = _nbytes(layout, boxes) == last - first + layout.itemsizes[boxes.tensor]
    strided = np.unique(boxes.tensor[~simple])
    clash = (first[1:] <= last[:-1]) & (boxes.tensor[1:] == boxes.tensor[:-1])
    found = set(np.setdiff1d(boxes.tensor[1:][clash], strided).tolist())
    bounds = np.searchsorted(boxes.tensor, np.stack([strided, strided + 1])).T
    for tensor, (low, high) in zip(strided.tolist(), bounds.tolist(), strict=True):
        start, stop = boxes.start[low:high], boxes.stop[low:high]
        shared = (np.maximum(start[:, None], start[None]) < np.minimum(stop[:, None], stop[None])).all(axis=2)
        if shared.sum() > high - low:
            found.add(tensor)
    return [f"{layout.specs[tensor].name}: held in boxes that overlap without being equal" for tensor in sorted(found)]


def _nbytes(layout: Layout, boxes: ShardTable) -> Int64s:
    nbytes: Int64s = np.prod(boxes.stop - boxes.start, axis=1, dtype=np.int64) * layout.itemsizes[boxes.tensor]
    return nbytes


def _pieces(layout: Layout, boxes: ShardTable, holders: Int32s, block_nbytes: int) -> _Batch:
    """Boxes as pieces by offset. A box that is one run of at most a block is a piece already."""
    first, last = _corners(layout, boxes)
    span = last - first + layout.itemsizes[boxes.tensor]
    if ((span > block_nbytes) | (span > _nbytes(layout, boxes))).any():
        boxes, origin = _split(layout, boxes, block_nbytes)
        order = np.argsort(_corners(layout, boxes)[0], kind="stable")
        boxes, holders = boxes.take(order), holders[origin[order]]
    return _Batch(boxes, holders)


def _choose_owners(layout: Layout, batches: Sequence[_Batch], sets: Sequence[Holders], num_owners: int) -> None:
    """Replace the number of a set by one of its ranks, for every piece."""
    if len(sets) == num_owners:
        return
    load = np.zeros(num_owners, np.int64)
    for batch in batches:
        alone = batch.owner < num_owners
        nbytes = _nbytes(layout, batch.boxes.take(alone))
        load += np.bincount(batch.owner[alone], nbytes, num_owners).astype(np.int64)
    shared = [np.flatnonzero(batch.owner >= num_owners) for batch in batches]
    nbytes = np.concatenate(
        [_nbytes(layout, batch.boxes.take(rows)) for batch, rows in zip(batches, shared, strict=True)]
    )
    holders = np.concatenate([batch.owner[rows] for batch, rows in zip(batches, shared, strict=True)])
    owner = assign(nbytes, holders, sets, load)
    done = 0
    for batch, rows in zip(batches, shared, strict=True):
        batch.owner[rows] = owner[done : done + len(rows)]
        done += len(rows)


def _sorted_by_owner(layout: Layout, batches: list[_Batch], num_owners: int) -> SyncPlan:
    """Lets go of `batches` one by one: their content is too large to be there twice."""
    counts = sum((np.bincount(batch.owner, minlength=num_owners) for batch in batches), np.zeros(num_owners, np.int64))
    first = np.concatenate([[0], np.cumsum(counts)])
    boxes = ShardTable.empty(layout, int(first[-1]))
    filled = first[:-1].copy()
    batches.reverse()
    while batches:
        batch = batches.pop()
        # numpy sorts 2-byte integers in linear time.
        order = np.argsort(batch.owner.astype(np.min_scalar_type(num_owners)), kind="stable")
        mine = np.bincount(batch.owner, minlength=num_owners)
        target = np.repeat(filled - (np.cumsum(mine) - mine), mine) + np.arange(len(order))
        for whole, part in zip(vars(boxes).values(), vars(batch.boxes).values(), strict=True):
            whole[target] = part[order]
        filled += mine
    return SyncPlan(layout, boxes, first)


def _split(layout: Layout, boxes: ShardTable, block_nbytes: int) -> tuple[ShardTable, Int64s]:
    """Cut boxes until each is evenly strided and at most `block_nbytes` long; also the row that each came from."""
    width = boxes.start.shape[1]
    origin = np.arange(len(boxes), dtype=np.int64)
    for dim in range(width):
        sizes, itemsize = layout.shapes[boxes.tensor], layout.itemsizes[boxes.tensor]
        extent = (boxes.stop - boxes.start).astype(np.int64)
        slice_nbytes = np.maximum(extent[:, dim + 1 :].prod(axis=1) * itemsize, 1)
        step = np.clip(block_nbytes // slice_nbytes, 1, np.maximum(extent[:, dim], 1))
        step = np.where(_uneven_below(sizes, extent, dim), 1, step)
        boxes, rows = _cut(boxes, dim, step)
        origin = origin[rows]
    return boxes, origin


def _uneven_below(sizes: Int64s, extent: Int64s, dim: int) -> npt.NDArray[np.bool_]:
    """Boxes whose rows along `dim` are not one stride apart: two dimensions below are partial."""
    partial = extent != sizes
    below = partial[:, dim + 1 :]
    if below.shape[1] < 2:
        return np.zeros(len(extent), bool)
    innermost = below.shape[1] - 1 - np.argmax(below[:, ::-1], axis=1)
    column = np.arange(below.shape[1])
    between = (below & (column[None] < innermost[:, None])).any(axis=1)
    uneven: npt.NDArray[np.bool_] = between & below.any(axis=1)
    return uneven


def _cut(boxes: ShardTable, dim: int, step: Int64s) -> tuple[ShardTable, Int64s]:
    """Cut box i along `dim` into parts of `step[i]` indices."""
    extent = boxes.stop[:, dim] - boxes.start[:, dim]
    parts = -(-extent // step)
    rows = np.repeat(np.arange(len(boxes), dtype=np.int64), parts)
    nth = np.arange(len(rows), dtype=np.int64) - np.repeat(np.cumsum(parts) - parts, parts)
    start, stop = boxes.start[rows], boxes.stop[rows]
    low = start[:, dim] + nth * step[rows]
    stop[:, dim] = np.minimum(low + step[rows], stop[:, dim])
    start[:, dim] = low
    return ShardTable(boxes.tensor[rows], start, stop), rows
