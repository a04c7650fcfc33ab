"""Boxes of many tensors as columns of numpy arrays, and their places in the region. No torch, no I/O.

A trillion-parameter model on 256 ranks has 18 million shards, so integers have 4 bytes if the model allows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from ..errors import PlanError
from .encoded import UNREADABLE, deflated, inflated
from .layout import MAX_DIMS, Layout, listed
from .types import Box, Shard

Int64s = npt.NDArray[np.int64]
Ints = npt.NDArray[np.signedinteger[Any]]
"""Integers of 4 or 8 bytes. Arithmetic that may overflow 4 bytes starts from a column of the layout, which has 8."""

MOST_ROWS = 2**26
"""Rows of a table: four times those of a trillion parameters on 256 ranks."""
MOST_EQUALS = 2**10
"""The most rows of a table in which no column varies."""
STEPS = tuple(np.dtype(f"<i{size}") for size in (1, 2, 4, 8))
"""The integer types of packed columns."""
CODES = frozenset(kind.str for kind in STEPS)
ROWS_AT_A_TIME = 2**17
"""Columns are computed from others in parts of this many rows, so that temporaries stay in the cache."""


@dataclass(frozen=True)
class ShardTable:
    """Boxes as columns. Row i is the box `start[i] <= index < stop[i]` of tensor `tensor[i]` of the layout.

    `start` and `stop` have one column per dimension of the widest tensor; the unused ones hold 0 and 1.
    """

    tensor: Ints
    start: Ints
    stop: Ints

    def __len__(self) -> int:
        return len(self.tensor)

    @classmethod
    def of(cls, layout: Layout, shards: Sequence[Shard]) -> ShardTable:
        """One row per shard. Raises PlanError listing shards of unknown tensors or outside their tensor's bounds."""
        shapes = layout.shapes
        table = cls.empty(layout, len(shards))
        problems = []
        tensors, starts, stops = [], [], []
        zeros, ones = (0,) * shapes.shape[1], (1,) * shapes.shape[1]
        for shard in shards:
            position, box = layout.index.get(shard.name), shard.box
            if position is None:
                problems.append(f"{shard.name}: held by a trainer rank but not among the specs")
                continue
            ndim = len(layout.specs[position].shape)
            if not len(box.start) == len(box.stop) == ndim:
                problems.append(_outside(layout, position, box))
                continue
            tensors.append(position)
            starts.append((*box.start, *zeros[ndim:]))
            stops.append((*box.stop, *ones[ndim:]))
        if tensors:
            tensor = np.array(tensors, np.int64)
            start = np.array(starts, np.int64).reshape(len(tensors), len(ones))
            stop = np.array(stops, np.int64).reshape(len(tensors), len(ones))
            inside = ((start >= 0) & (start <= stop) & (stop <= shapes[tensor])).all(axis=1)
            for row in np.flatnonzero(~inside).tolist():
                ndim = len(layout.specs[tensors[row]].shape)
                problems.append(_outside(layout, tensors[row], Box(starts[row][:ndim], stops[row][:ndim])))
            if not problems:
                table.tensor[:], table.start[:], table.stop[:] = tensor, start, stop
        if problems:
            raise PlanError(f"{len(problems)} shards do not fit the model: {listed(problems)}")
        return table

    @classmethod
    def empty(cls, layout: Layout, rows: int) -> ShardTable:
        """A table of `rows` uninitialised rows, of integers that are wide enough for the layout."""
        width = layout.shapes.shape[1]
        largest = max(len(layout.specs), int(layout.shapes.max(initial=1)))
        kind = np.int32 if largest < 2**31 else np.int64
        return cls(np.empty(rows, kind), np.empty((rows, width), kind), np.empty((rows, width), kind))

    def box(self, row: int, ndim: int) -> Box:
        return Box(tuple(self.start[row, :ndim].tolist()), tuple(self.stop[row, :ndim].tolist()))

    def take(self, rows: Int64s | npt.NDArray[np.bool_] | slice) -> ShardTable:
        return ShardTable(self.tensor[rows], self.start[rows], self.stop[rows])

    def columns(self) -> list[Any]:
        """The table as values for msgpack; `from_columns` decodes them."""
        return [self.start.shape, *(_packed(part) for part in (self.tensor, *self.start.T, *self.stop.T))]

    @classmethod
    def from_columns(cls, columns: Sequence[Any]) -> ShardTable:
        """Undo `columns`. Raises an error of `encoded.UNREADABLE` for other values, before it allocates for them."""
        rows, width = msgspec.convert(columns[0], tuple[int, int])
        if not 0 <= width <= MAX_DIMS or len(columns) != 2 + 2 * width:
            raise ValueError(f"{len(columns) - 1} columns of a table of {width} dimensions")
        if not 0 <= rows <= MOST_ROWS:
            raise ValueError(f"{rows} rows")
        packed = [_unpacked(column, rows) for column in columns[1:]]
        if lengths := {len(column) for column in packed} - {1, rows}:
            raise ValueError(f"columns of {sorted(lengths)[:4]} instead of {rows} rows")
        if rows > max(MOST_EQUALS, *map(len, packed)):
            raise ValueError(f"{rows} rows that are all the same")
        kind = np.int32 if all(_fits(column) for column in packed) else np.int64
        tensor: Ints = np.empty(rows, kind)
        start: Ints = np.empty((rows, width), kind)
        stop: Ints = np.empty((rows, width), kind)
        for target, column in zip((tensor, *start.T, *stop.T), packed, strict=True):
            target[:] = column
        return cls(tensor, start, stop)

    def encode(self) -> bytes:
        return msgspec.msgpack.encode(self.columns())

    @classmethod
    def decode(cls, data: bytes) -> ShardTable:
        """Undo `encode`. Raises PlanError for other bytes. `require_inside` checks that the boxes fit a model."""
        try:
            return cls.from_columns(msgspec.msgpack.decode(data, type=list[Any]))
        except UNREADABLE as exc:
            raise PlanError(f"not an encoded table of shards: {exc}") from exc

    def require_inside(self, layout: Layout) -> None:
        """Raises PlanError unless every box lies inside a tensor of `layout`."""
        shapes = layout.shapes
        if len(self) and (self.start.shape[1] != shapes.shape[1] or not len(shapes)):
            raise PlanError(f"shards with {self.start.shape[1]} dimensions of a model with {shapes.shape[1]}")
        for low in range(0, len(self), ROWS_AT_A_TIME):
            part = self.take(slice(low, low + ROWS_AT_A_TIME))
            known = (part.tensor >= 0) & (part.tensor < len(shapes))
            sizes = shapes[np.where(known, part.tensor, 0)]
            inside = known & ((part.start >= 0) & (part.start <= part.stop) & (part.stop <= sizes)).all(axis=1)
            if not inside.all():
                row = int(np.flatnonzero(~inside)[0])
                raise PlanError(
                    f"shard {low + row} does not lie inside a tensor of the model: tensor {int(part.tensor[row])}, "
                    f"{part.start[row].tolist()} to {part.stop[row].tolist()}"
                )


def _packed(column: Ints) -> tuple[str, bytes]:
    """The dtype and the bytes, deflated, of the differences from row to row, in the narrowest type.

    Members hold pieces in regular patterns: of 18 million rows a megabyte and a half is left. One row stands for a
    column of equals.
    """
    if len(column) and int(column.min()) == int(column.max()):
        column = column[:1]
    steps = np.diff(column, prepend=np.zeros(1, np.int64))
    low, high = int(steps.min(initial=0)), int(steps.max(initial=0))
    kind = next(kind for kind in STEPS if np.iinfo(kind).min <= low and high <= np.iinfo(kind).max)
    return kind.str, deflated(steps.astype(kind).data)


def _unpacked(column: Any, rows: int) -> Ints:
    """At most so many `rows`. Raises ValueError or TypeError for what `_packed` does not make."""
    code, data = column
    if code not in CODES:
        raise ValueError(f"a column of {str(code)[:40]!r}")
    kind = np.dtype(code)
    steps = np.frombuffer(inflated(data, rows * kind.itemsize), kind)
    values = np.cumsum(steps, dtype=np.int64)
    return values.astype(np.int32) if _fits(values) else values


def _fits(column: Ints) -> bool:
    """Whether 4 bytes with a sign hold it."""
    info = np.iinfo(np.int32)
    return bool(column.itemsize < 4 or (info.min <= column.min(initial=0) and column.max(initial=0) <= info.max))


def _outside(layout: Layout, tensor: int, box: Box) -> str:
    return f"{layout.specs[tensor].name}: {box} does not lie inside the shape {layout.specs[tensor].shape}"


@dataclass(frozen=True)
class Extents:
    """The bytes of boxes in the region: of box i `rows[i]` runs of `run_nbytes[i]` from `offset[i]`, `stride[i]` apart.

    A box of whole rows is one run. A box of columns is one run per row.
    """

    offset: Int64s
    run_nbytes: Int64s
    rows: Int64s
    stride: Int64s

    def __len__(self) -> int:
        return len(self.offset)

    @property
    def end(self) -> Int64s:
        """The offset behind the last byte of each box."""
        return self.offset + (self.rows - 1) * self.stride + self.run_nbytes

    @property
    def nbytes(self) -> Int64s:
        return self.run_nbytes * self.rows

    @property
    def spans(self) -> Int64s:
        """[boxes, 2]: the offset of each box, and its bytes to its end, gaps between runs included."""
        return np.stack([self.offset, self.end - self.offset], axis=1)

    def take(self, rows: Int64s) -> Extents:
        return Extents(self.offset[rows], self.run_nbytes[rows], self.rows[rows], self.stride[rows])

    def of(self, rows: range) -> list[tuple[int, int, int, int]]:
        """(offset, run_nbytes, rows, stride) of each of `rows` as plain numbers, for loops that touch every piece."""
        part = slice(rows.start, rows.stop)
        columns = (self.offset[part], self.run_nbytes[part], self.rows[part], self.stride[part])
        return list(zip(*(column.tolist() for column in columns), strict=True))


def extents_of(layout: Layout, boxes: ShardTable) -> Extents:
    """The extents of `boxes`, which must be evenly strided, as the pieces of a plan are."""
    columns = Extents(*(np.empty(len(boxes), np.int64) for _ in range(4)))
    for low in range(0, len(boxes), ROWS_AT_A_TIME):
        part = slice(low, low + ROWS_AT_A_TIME)
        found = _extents(layout, boxes.take(part))
        for whole, filled in zip(vars(columns).values(), found, strict=True):
            whole[part] = filled
    return columns


def _extents(layout: Layout, boxes: ShardTable) -> tuple[Int64s, Int64s, Int64s, Int64s]:
    sizes, strides, itemsize = layout.shapes[boxes.tensor], layout.strides[boxes.tensor], layout.itemsizes[boxes.tensor]
    extent = boxes.stop - boxes.start
    count, width = extent.shape
    offset = layout.bases[boxes.tensor] + (boxes.start * strides).sum(axis=1)
    run = itemsize.copy()
    rows = np.ones(count, np.int64)
    stride = np.zeros(count, np.int64)
    contiguous = np.ones(count, bool)
    for dim in range(width - 1, -1, -1):
        run = np.where(contiguous, run * extent[:, dim], run)
        starts_rows = ~contiguous & (extent[:, dim] > 1) & (rows == 1)
        stride = np.where(starts_rows, strides[:, dim], stride)
        rows = np.where(~contiguous, rows * extent[:, dim], rows)
        contiguous &= extent[:, dim] == sizes[:, dim]
    return offset, run, rows, stride


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
