"""Tensors without values that record the origin of their elements.

transformers converts a checkpoint with functions on tensors: stack, split, transpose. Called with a `Rearranged` for
each tensor, these functions show the destination of every box, without reading or copying a value. Other operations
(arithmetic, interleaving) are refused.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from operator import ge
from typing import Any

import torch

from verl.checkpoint_engine.plan.types import Box


class NotARearrangement(AttributeError):
    """An operation does more than move boxes of elements."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """`box` of a rearranged tensor is a box of the tensor `origin`."""

    box: Box
    origin: str
    start: tuple[int, ...]
    """First index in `origin`, of each of its dimensions."""
    dims: tuple[int | None, ...]
    """For each dimension of `origin` the corresponding dimension of the rearranged tensor. None: the index is `start`,
    as for a dimension of length one that was removed."""

    @property
    def origin_box(self) -> Box:
        lengths = [1 if dim is None else self.box.shape[dim] for dim in self.dims]
        return Box(self.start, tuple(start + length for start, length in zip(self.start, lengths, strict=True)))

    def narrowed(self, box: Box) -> Piece | None:
        """The part of it that lies in `box` of the rearranged tensor."""
        low = tuple(map(max, self.box.start, box.start))
        high = tuple(map(min, self.box.stop, box.stop))
        if any(first >= last for first, last in zip(low, high, strict=True)):
            return None
        start = tuple(
            first if dim is None else first + low[dim] - self.box.start[dim]
            for first, dim in zip(self.start, self.dims, strict=True)
        )
        return replace(self, box=Box(low, high), start=start)

    def between(self, dim: int, low: int, high: int) -> Piece | None:
        """The part at `low <= index < high` of dimension `dim` of the rearranged tensor, as a piece of that part."""
        old = self.box.start[dim]
        first, last = max(old, low), min(self.box.stop[dim], high)
        box = Box(_with(self.box.start, dim, first - low), _with(self.box.stop, dim, last - low))
        if any(map(ge, box.start, box.stop)):
            return None
        start = self.start
        if first > old and dim in self.dims:
            place = self.dims.index(dim)
            start = _with(start, place, start[place] + first - old)
        return Piece(box=box, origin=self.origin, start=start, dims=self.dims)

    def in_rearranged(self, box: Box) -> Box | None:
        """Which part of `self.box` is that of `origin` in `box`; None if there is none."""
        low, high = list(self.box.start), list(self.box.stop)
        for dim, first, start, stop in zip(self.dims, self.start, box.start, box.stop, strict=True):
            if dim is None:
                if not start <= first < stop:
                    return None
            else:
                shift = self.box.start[dim] - first
                low[dim], high[dim] = max(low[dim], start + shift), min(high[dim], stop + shift)
        if any(first >= last for first, last in zip(low, high, strict=True)):
            return None
        return Box(tuple(low), tuple(high))

    def to_origin(self, values: torch.Tensor) -> torch.Tensor:
        """`values` of a box of the rearranged tensor as a view with the dimensions of `origin`."""
        if self.dims == tuple(range(values.dim())):
            return values
        kept = [dim for dim in self.dims if dim is not None]
        for dim in reversed(range(values.dim())):
            if dim not in kept:
                values = values.select(dim, 0)
        rank = {dim: index for index, dim in enumerate(sorted(kept))}
        values = values.permute([rank[dim] for dim in kept])
        for index, target in enumerate(self.dims):
            if target is None:
                values = values.unsqueeze(index)
        return values

    def to_rearranged(self, values: torch.Tensor) -> torch.Tensor:
        """`values` of a box of `origin` as a view with the dimensions of the rearranged tensor."""
        order = [dim for dim in self.dims if dim is not None]
        for index in reversed([index for index, target in enumerate(self.dims) if target is None]):
            values = values.select(index, 0)
        values = values.permute(sorted(range(len(order)), key=order.__getitem__))
        for dim in range(len(self.box.start)):
            if dim not in order:
                values = values.unsqueeze(dim)
        return values


class Rearranged:
    """Shape and pieces of a tensor. Handed to functions that expect a `torch.Tensor`; those that it knows work."""

    def __init__(self, shape: Sequence[int], pieces: Sequence[Piece]) -> None:
        self.shape = torch.Size(shape)
        self.pieces = tuple(pieces)

    @classmethod
    def of(cls, name: str, shape: Sequence[int]) -> Rearranged:
        """The tensor `name` as it is."""
        box = Box.whole(tuple(shape))
        return cls(shape, [Piece(box=box, origin=name, start=box.start, dims=tuple(range(len(box.start))))])

    @property
    def ndim(self) -> int:
        return len(self.shape)

    def dim(self) -> int:
        return self.ndim

    def numel(self) -> int:
        return self.shape.numel()

    def size(self, dim: int | None = None) -> Any:
        return self.shape if dim is None else self.shape[dim]

    def contiguous(self, *_: Any, **__: Any) -> Rearranged:
        return self

    clone = detach = to = cpu = contiguous

    def narrow(self, dim: int, start: int, length: int) -> Rearranged:
        dim %= self.ndim
        parts = (piece.between(dim, start, start + length) for piece in self.pieces)
        return Rearranged(_with(tuple(self.shape), dim, length), [part for part in parts if part])

    def permute(self, *order: Any) -> Rearranged:
        old = [index % self.ndim for index in (order[0] if isinstance(order[0], tuple | list) else order)]
        new = {dim: index for index, dim in enumerate(old)}
        return self._with_dims([self.shape[dim] for dim in old], lambda values: [values[dim] for dim in old], new.get)

    def transpose(self, dim0: int, dim1: int) -> Rearranged:
        order = list(range(self.ndim))
        order[dim0], order[dim1] = order[dim1], order[dim0]
        return self.permute(order)

    def unsqueeze(self, dim: int) -> Rearranged:
        dim %= self.ndim + 1
        pieces = [
            Piece(
                box=Box(_inserted(piece.box.start, dim, 0), _inserted(piece.box.stop, dim, 1)),
                origin=piece.origin,
                start=piece.start,
                dims=tuple(own if own is None or own < dim else own + 1 for own in piece.dims),
            )
            for piece in self.pieces
        ]
        return Rearranged(_inserted(tuple(self.shape), dim, 1), pieces)

    def squeeze(self, dim: int | None = None) -> Rearranged:
        if dim is None:
            dropped = [index for index, size in enumerate(self.shape) if size == 1]
        else:
            dropped = [dim % self.ndim] if self.shape[dim] == 1 else []
        kept = [index for index in range(self.ndim) if index not in dropped]
        new = {dim: index for index, dim in enumerate(kept)}
        return self._with_dims([self.shape[dim] for dim in kept], lambda values: [values[dim] for dim in kept], new.get)

    def split(self, split_size: int | Sequence[int], dim: int = 0) -> tuple[Rearranged, ...]:
        total = self.shape[dim]
        if isinstance(split_size, int):
            split_size = [min(split_size, total - low) for low in range(0, total, split_size)]
        ends = accumulate(split_size)
        return tuple(self.narrow(dim, end - size, size) for end, size in zip(ends, split_size, strict=True))

    def chunk(self, chunks: int, dim: int = 0) -> tuple[Rearranged, ...]:
        return self.split(-(-self.shape[dim] // chunks), dim)

    def unbind(self, dim: int = 0) -> tuple[Rearranged, ...]:
        return tuple(part.squeeze(dim) for part in self.split(1, dim))

    def __getitem__(self, index: Any) -> Rearranged:
        indices = index if isinstance(index, tuple) else (index,)
        if Ellipsis in indices:
            place = indices.index(Ellipsis)
            fill = (slice(None),) * (self.ndim - len(indices) + 1)
            indices = indices[:place] + fill + indices[place + 1 :]
        found, dropped = self, []
        for dim, one in enumerate(indices):
            if isinstance(one, int):
                found, one = found.narrow(dim, one % self.shape[dim], 1), None
                dropped.append(dim)
            elif isinstance(one, slice) and one.step in (None, 1):
                start, stop, _ = one.indices(self.shape[dim])
                found = found.narrow(dim, start, max(stop - start, 0))
            else:
                raise NotARearrangement(f"indexing with {one!r}")
        for dim in reversed(dropped):
            found = found.squeeze(dim)
        return found

    def _with_dims(
        self,
        shape: Sequence[int],
        chosen: Callable[[tuple[int, ...]], list[int]],
        renumbered: Callable[[int], int | None],
    ) -> Rearranged:
        pieces = [
            Piece(
                box=Box(tuple(chosen(piece.box.start)), tuple(chosen(piece.box.stop))),
                origin=piece.origin,
                start=piece.start,
                dims=tuple(None if dim is None else renumbered(dim) for dim in piece.dims),
            )
            for piece in self.pieces
        ]
        return Rearranged(shape, pieces)

    def __getattr__(self, name: str) -> Any:
        raise NotARearrangement(f"Tensor.{name}")

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Any, arguments: tuple[Any, ...] = (), named: dict[str, Any] | None = None
    ) -> Any:
        own = {torch.cat: _cat, torch.concat: _cat, torch.stack: _stack}.get(function)
        name = getattr(function, "__name__", str(function))
        if own is not None:
            return own(*arguments, **(named or {}))
        if name in _METHODS:
            return getattr(arguments[0], name)(*arguments[1:], **(named or {}))
        raise NotARearrangement(f"torch.{name}")


_METHODS = frozenset({"chunk", "split", "unbind", "narrow", "permute", "transpose", "squeeze", "unsqueeze", "clone"})


def _cat(tensors: Sequence[Rearranged], dim: int = 0) -> Rearranged:
    first = tensors[0]
    dim %= first.ndim
    shapes = [tuple(tensor.shape[:dim] + tensor.shape[dim + 1 :]) for tensor in tensors]
    usual, _ = Counter(shapes).most_common(1)[0]
    odd = [tensor.pieces[0] for tensor, shape in zip(tensors, shapes, strict=True) if shape != usual and tensor.pieces]
    if odd:
        wrong = ", ".join(f"{piece.origin} {piece.origin_box.shape}" for piece in odd)
        raise ValueError(f"these have another shape than the others: {wrong}")
    pieces: list[Piece] = []
    length = 0
    for tensor in tensors:
        pieces += [_moved(piece, dim, length) for piece in tensor.pieces]
        length += tensor.shape[dim]
    return Rearranged([length if index == dim else size for index, size in enumerate(first.shape)], pieces)


def _stack(tensors: Sequence[Rearranged], dim: int = 0) -> Rearranged:
    return _cat([tensor.unsqueeze(dim) for tensor in tensors], dim % (tensors[0].ndim + 1))


def _moved(piece: Piece, dim: int, by: int) -> Piece:
    start, stop = piece.box.start, piece.box.stop
    box = Box(_with(start, dim, start[dim] + by), _with(stop, dim, stop[dim] + by))
    return Piece(box=box, origin=piece.origin, start=piece.start, dims=piece.dims)


def _with(values: tuple[int, ...], place: int, value: int) -> tuple[int, ...]:
    return (*values[:place], value, *values[place + 1 :])


def _inserted(values: tuple[int, ...], place: int, value: int) -> tuple[int, ...]:
    return (*values[:place], value, *values[place:])
