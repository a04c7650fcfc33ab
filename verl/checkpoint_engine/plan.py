"""Who sends which bytes: from what every trainer rank holds to pieces with one owner each. No torch, no I/O.

    shards of each rank -> ShardTable -> prove that they cover the model once -> pieces <= block -> one owner per piece

Everything is a column of a numpy array, because a trillion-parameter model on 256 ranks has millions of shards.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import msgspec
import numpy as np
import numpy.typing as npt

from verl.checkpoint_engine.errors import PlanError
from verl.checkpoint_engine.layout import Layout
from verl.checkpoint_engine.types import ITEMSIZE, Box, Shard

Int64s = npt.NDArray[np.int64]

MAX_NAMES_IN_MESSAGE = 50


@dataclass(frozen=True)
class ShardTable:
    """Boxes as columns. Row i is the box `start[i] <= index < stop[i]` of tensor `tensor[i]` of the layout.

    `start` and `stop` have one column per dimension of the widest tensor; the unused ones hold 0 and 1.
    """

    tensor: Int64s
    start: Int64s
    stop: Int64s

    def __len__(self) -> int:
        return len(self.tensor)

    @classmethod
    def of(cls, layout: Layout, shards: Sequence[Shard]) -> ShardTable:
        """Raises PlanError that lists every shard which names an unknown tensor or leaves its tensor's bounds."""
        width = max((len(spec.shape) for spec in layout.specs), default=0)
        tensor = np.zeros(len(shards), np.int64)
        start = np.zeros((len(shards), width), np.int64)
        stop = np.ones((len(shards), width), np.int64)
        problems = []
        for row, shard in enumerate(shards):
            position = layout.index.get(shard.name)
            if position is None:
                problems.append(f"{shard.name}: held by a trainer rank but not among the specs")
                continue
            shape, box = layout.specs[position].shape, shard.box
            if len(box.start) != len(shape) or any(
                not 0 <= low <= high <= size for low, high, size in zip(box.start, box.stop, shape, strict=True)
            ):
                problems.append(f"{shard.name}: {box} does not lie inside the shape {shape}")
                continue
            tensor[row] = position
            start[row, : len(shape)] = box.start
            stop[row, : len(shape)] = box.stop
        if problems:
            raise PlanError(f"{len(problems)} shards do not fit the model: {_listed(problems)}")
        return cls(tensor, start, stop)

    def box(self, row: int, ndim: int) -> Box:
        return Box(tuple(self.start[row, :ndim].tolist()), tuple(self.stop[row, :ndim].tolist()))

    def take(self, rows: Int64s) -> ShardTable:
        return ShardTable(self.tensor[rows], self.start[rows], self.stop[rows])

    def encode(self) -> bytes:
        return msgspec.msgpack.encode(
            [list(self.start.shape), self.tensor.tobytes(), self.start.tobytes(), self.stop.tobytes()]
        )

    @classmethod
    def decode(cls, data: bytes) -> ShardTable:
        """Raises PlanError if `data` was not made by `encode`."""
        try:
            shape, tensor, start, stop = msgspec.msgpack.decode(data, type=tuple[list[int], bytes, bytes, bytes])
            return cls(
                np.frombuffer(tensor, np.int64),
                np.frombuffer(start, np.int64).reshape(shape),
                np.frombuffer(stop, np.int64).reshape(shape),
            )
        except (msgspec.MsgspecError, ValueError) as exc:
            raise PlanError(f"not an encoded table of shards: {exc}") from exc


@dataclass(frozen=True)
class Extents:
    """Where boxes lie in the region: `rows[i]` runs of `run_nbytes[i]` bytes from `offset[i]`, `stride[i]` apart.

    A box of whole rows is one run. A box of columns is one run per row.
    """

    offset: Int64s
    run_nbytes: Int64s
    rows: Int64s
    stride: Int64s

    def __len__(self) -> int:
        return len(self.offset)

    @property
    def nbytes(self) -> Int64s:
        return self.run_nbytes * self.rows

    def of(self, rows: range) -> list[tuple[int, int, int, int]]:
        """(offset, run_nbytes, rows, stride) of each of `rows` as plain numbers, for loops that touch every piece."""
        part = slice(rows.start, rows.stop)
        columns = (self.offset[part], self.run_nbytes[part], self.rows[part], self.stride[part])
        return list(zip(*(column.tolist() for column in columns), strict=True))


@dataclass(frozen=True)
class SyncPlan:
    """The pieces of one version: each lies in one tensor, is at most a block long, and is sent by one owner.

    Pieces are sorted by owner, then by offset. `first[r]:first[r + 1]` are those of trainer rank r.
    """

    layout: Layout
    boxes: ShardTable
    extents: Extents
    owner: Int64s
    first: Int64s

    def __len__(self) -> int:
        return len(self.owner)

    @property
    def num_owners(self) -> int:
        return len(self.first) - 1

    def pieces_of(self, owner: int) -> range:
        return range(int(self.first[owner]), int(self.first[owner + 1]))

    def shards_of(self, owner: int) -> list[Shard]:
        """The pieces of `owner`, by name and box."""
        part = slice(int(self.first[owner]), int(self.first[owner + 1]))
        columns = (self.boxes.tensor[part], self.boxes.start[part], self.boxes.stop[part])
        shards = []
        for tensor, start, stop in zip(*(column.tolist() for column in columns), strict=True):
            spec = self.layout.specs[tensor]
            ndim = len(spec.shape)
            shards.append(Shard(spec.name, Box(tuple(start[:ndim]), tuple(stop[:ndim]))))
        return shards

    def nbytes_of(self, owner: int) -> int:
        return int(self.extents.nbytes[self.first[owner] : self.first[owner + 1]].sum())

    def describe(self, piece: int) -> str:
        """`model.norm.weight[0:896] (bytes 1024..2816, from trainer-1)`: for messages."""
        spec = self.layout.specs[int(self.boxes.tensor[piece])]
        box = self.boxes.box(piece, len(spec.shape))
        span = ", ".join(f"{low}:{high}" for low, high in zip(box.start, box.stop, strict=True))
        offset, end = int(self.extents.offset[piece]), self._end(piece)
        return f"{spec.name}[{span}] (bytes {offset}..{end}, from trainer-{int(self.owner[piece])})"

    def _end(self, piece: int) -> int:
        extents = self.extents
        return int(
            extents.offset[piece] + (extents.rows[piece] - 1) * extents.stride[piece] + extents.run_nbytes[piece]
        )

    def encode(self) -> bytes:
        return msgspec.msgpack.encode(
            [self.layout.encode(), self.boxes.encode(), self.owner.tobytes(), self.num_owners]
        )

    @classmethod
    def decode(cls, data: bytes) -> SyncPlan:
        """Raises PlanError if `data` was not made by `encode`."""
        try:
            layout_data, boxes_data, owner_data, num_owners = msgspec.msgpack.decode(
                data, type=tuple[bytes, bytes, bytes, int]
            )
            owner = np.frombuffer(owner_data, np.int64)
        except (msgspec.MsgspecError, ValueError) as exc:
            raise PlanError(f"not an encoded plan: {exc}") from exc
        layout = Layout.decode(layout_data)
        boxes = ShardTable.decode(boxes_data)
        first = np.searchsorted(owner, np.arange(num_owners + 1))
        return cls(layout, boxes, extents_of(layout, boxes), owner, first)


def make_plan(layout: Layout, held: Sequence[ShardTable], *, block_nbytes: int) -> SyncPlan:
    """The plan for trainer ranks that hold `held[rank]`.

    A box that several ranks hold is sent by one of them: its pieces are dealt to the rank with the fewest bytes so far.
    Raises PlanError, listing every tensor, unless the boxes cover each byte of the layout exactly once.
    """
    boxes, holders = _unique_boxes(held)
    _prove_coverage(layout, boxes)
    pieces, origin = _split(layout, boxes, block_nbytes)
    extents = extents_of(layout, pieces)
    owner = _assign(extents.nbytes, [holders[row] for row in origin.tolist()], len(held))
    order = np.lexsort((extents.offset, owner))
    pieces = pieces.take(order)
    owner = owner[order]
    first = np.searchsorted(owner, np.arange(len(held) + 1))
    return SyncPlan(layout, pieces, extents_of(layout, pieces), owner, first)


def flat_range_boxes(shape: tuple[int, ...], start: int, stop: int) -> list[Box]:
    """The boxes that make up elements `start..stop` of a tensor flattened in C order: at most two per dimension."""
    if start >= stop:
        return []
    if not shape:
        return [Box((), ())]
    inner = int(np.prod(shape[1:], dtype=np.int64))
    first, last = start // inner, (stop - 1) // inner
    if first == last:
        below = flat_range_boxes(shape[1:], start - first * inner, stop - first * inner)
        return [Box((first, *box.start), (first + 1, *box.stop)) for box in below]
    boxes = []
    head = start - first * inner
    if head:
        boxes += flat_range_boxes(shape, start, (first + 1) * inner)
        first += 1
    tail = stop - last * inner
    whole_until = last + 1 if tail == inner else last
    if first < whole_until:
        boxes.append(Box((first, *(0,) * (len(shape) - 1)), (whole_until, *shape[1:])))
    if whole_until == last:
        boxes += flat_range_boxes(shape, last * inner, stop)
    return boxes


def extents_of(layout: Layout, boxes: ShardTable) -> Extents:
    """Where each box lies. Boxes must be evenly strided: those that `_split` returns are."""
    sizes, itemsize, base = _columns(layout, boxes)
    extent = boxes.stop - boxes.start
    count, width = extent.shape
    element_stride = np.ones((count, width + 1), np.int64)
    for dim in range(width - 1, -1, -1):
        element_stride[:, dim] = element_stride[:, dim + 1] * sizes[:, dim]
    offset = base + (boxes.start * element_stride[:, 1:]).sum(axis=1) * itemsize
    run = np.ones(count, np.int64)
    rows = np.ones(count, np.int64)
    stride = np.zeros(count, np.int64)
    contiguous = np.ones(count, bool)
    for dim in range(width - 1, -1, -1):
        run = np.where(contiguous, run * extent[:, dim], run)
        starts_rows = ~contiguous & (extent[:, dim] > 1) & (rows == 1)
        stride = np.where(starts_rows, element_stride[:, dim + 1], stride)
        rows = np.where(~contiguous, rows * extent[:, dim], rows)
        contiguous &= extent[:, dim] == sizes[:, dim]
    return Extents(offset, run * itemsize, rows, stride * itemsize)


def _columns(layout: Layout, boxes: ShardTable) -> tuple[Int64s, Int64s, Int64s]:
    """Sizes per dimension (1 where unused), bytes per element and base offset of each box's tensor."""
    width = boxes.start.shape[1]
    sizes = np.ones((len(layout.specs), width), np.int64)
    for position, spec in enumerate(layout.specs):
        sizes[position, : len(spec.shape)] = spec.shape
    itemsize = np.array([ITEMSIZE[spec.dtype] for spec in layout.specs], np.int64)
    base = np.array(layout.offsets, np.int64)
    return sizes[boxes.tensor], itemsize[boxes.tensor], base[boxes.tensor]


def _unique_boxes(held: Sequence[ShardTable]) -> tuple[ShardTable, list[tuple[int, ...]]]:
    """Every distinct non-empty box once, with the ranks that hold it in ascending order."""
    rank = np.concatenate(
        [np.full(len(table), index, np.int64) for index, table in enumerate(held)] or [np.zeros(0, np.int64)]
    )
    table = ShardTable(
        np.concatenate([table.tensor for table in held]),
        np.concatenate([table.start for table in held]),
        np.concatenate([table.stop for table in held]),
    )
    filled = np.flatnonzero((table.stop > table.start).all(axis=1))
    table, rank = table.take(filled), rank[filled]
    rows = np.column_stack([table.tensor, table.start, table.stop])
    _, first, inverse = np.unique(rows, axis=0, return_index=True, return_inverse=True)
    inverse = inverse.reshape(-1)
    order = np.argsort(inverse, kind="stable")
    bounds = np.searchsorted(inverse[order], np.arange(len(first) + 1))
    ranks_in_order = rank[order].tolist()
    holders = [
        tuple(sorted(set(ranks_in_order[low:high])))
        for low, high in zip(bounds[:-1].tolist(), bounds[1:].tolist(), strict=True)
    ]
    return table.take(first), holders


def _prove_coverage(layout: Layout, boxes: ShardTable) -> None:
    """Every element of every tensor lies in exactly one of the distinct `boxes`."""
    numel = (boxes.stop - boxes.start).prod(axis=1)
    covered = np.zeros(len(layout.specs), np.int64)
    np.add.at(covered, boxes.tensor, numel)
    needed = np.array([spec.numel for spec in layout.specs], np.int64)
    problems = [
        f"{layout.specs[position].name}: "
        f"{needed[position] - covered[position]} of {needed[position]} elements held by nobody"
        for position in np.flatnonzero(covered < needed).tolist()
    ]
    overlapping = set(np.flatnonzero(covered > needed).tolist()) | _overlapping_tensors(layout, boxes)
    problems += [
        f"{layout.specs[position].name}: held in boxes that overlap without being equal"
        for position in sorted(overlapping)
    ]
    if problems:
        raise PlanError(f"{len(problems)} tensors are not covered exactly once: {_listed(problems)}")


def _overlapping_tensors(layout: Layout, boxes: ShardTable) -> set[int]:
    """Tensors with two boxes that share an element. Contiguous boxes are intervals; others are compared in pairs."""
    if not len(boxes):
        return set()
    _, itemsize, _ = _columns(layout, boxes)
    extents = extents_of(layout, boxes)
    evenly_contiguous = (extents.rows == 1) & ((boxes.stop - boxes.start).prod(axis=1) * itemsize == extents.run_nbytes)
    strided_tensors = np.unique(boxes.tensor[~evenly_contiguous])
    simple = ~np.isin(boxes.tensor, strided_tensors)
    rows = np.flatnonzero(simple)
    rows = rows[np.argsort(extents.offset[rows], kind="stable")]
    end = extents.offset[rows] + extents.run_nbytes[rows]
    clash = np.flatnonzero(extents.offset[rows][1:] < end[:-1])
    found = set(boxes.tensor[rows[clash]].tolist())
    for tensor in strided_tensors.tolist():
        mine = np.flatnonzero(boxes.tensor == tensor)
        start, stop = boxes.start[mine], boxes.stop[mine]
        shared = (np.maximum(start[:, None], start[None]) < np.minimum(stop[:, None], stop[None])).all(axis=2)
        if shared.sum() > len(mine):
            found.add(tensor)
    return found


def _split(layout: Layout, boxes: ShardTable, block_nbytes: int) -> tuple[ShardTable, Int64s]:
    """Cut boxes until each is evenly strided and at most `block_nbytes` long; also the row that each came from."""
    width = boxes.start.shape[1]
    origin = np.arange(len(boxes), dtype=np.int64)
    for dim in range(width):
        sizes, itemsize, _ = _columns(layout, boxes)
        extent = boxes.stop - boxes.start
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


def _assign(nbytes: Int64s, holders: list[tuple[int, ...]], num_owners: int) -> Int64s:
    """One owner per piece, so that the bytes per owner are as even as the holders allow. Largest pieces first."""
    owner = np.array([ranks[0] for ranks in holders], np.int64)
    shared = np.array([len(ranks) > 1 for ranks in holders], bool)
    load = np.bincount(owner[~shared], weights=nbytes[~shared], minlength=num_owners).tolist()
    contested = np.flatnonzero(shared)
    for piece in contested[np.argsort(-nbytes[contested], kind="stable")].tolist():
        chosen = min(holders[piece], key=load.__getitem__)
        owner[piece] = chosen
        load[chosen] += float(nbytes[piece])
    return owner


def _listed(problems: list[str]) -> str:
    shown = "; ".join(problems[:MAX_NAMES_IN_MESSAGE])
    hidden = len(problems) - MAX_NAMES_IN_MESSAGE
    return f"{shown}; and {hidden} more" if hidden > 0 else shown
