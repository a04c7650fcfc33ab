"""The layout of a version: each Hugging Face tensor name gets an aligned offset in one memory region. No torch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod

import msgspec
import numpy as np
import numpy.typing as npt
import xxhash

from ..errors import PlanError
from .encoded import unpacked
from .types import ITEMSIZE, TensorSpec

ALIGNMENT = 256
"""Every tensor starts at a multiple of this many bytes: enough for vector loads and bulk copies of accelerators."""

MAX_DIMS = 64
"""Dimensions of a tensor; torch allows no more."""
MAX_NBYTES = 2**56
"""Bytes of a version: sums and products of offsets stay far within 8-byte integers."""
MAX_NAMES_IN_MESSAGE = 50


def listed(problems: Sequence[str]) -> str:
    shown = "; ".join(problems[:MAX_NAMES_IN_MESSAGE])
    hidden = len(problems) - MAX_NAMES_IN_MESSAGE
    return f"{shown}; and {hidden} more" if hidden > 0 else shown


def align(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


@dataclass(frozen=True)
class Layout:
    """Tensor `specs[i]` occupies `specs[i].nbytes` bytes from `offsets[i]`; the region has `nbytes` bytes.

    Trainer ranks, rollout nodes and engines compute it from the same specs and compare `digest` before bytes move.
    """

    specs: tuple[TensorSpec, ...]
    offsets: tuple[int, ...]
    nbytes: int

    @classmethod
    def of(cls, specs: Sequence[TensorSpec]) -> Layout:
        """Lay out `specs` in order. Raises PlanError listing names that appear twice, unknown dtypes, bad shapes."""
        problems = []
        seen: set[str] = set()
        for spec in specs:
            if spec.name in seen:
                problems.append(f"{spec.name}: appears twice")
            seen.add(spec.name)
            if spec.dtype not in ITEMSIZE:
                problems.append(f"{spec.name}: unknown dtype {spec.dtype!r}")
            elif len(spec.shape) > MAX_DIMS:
                problems.append(f"{spec.name}: {len(spec.shape)} dimensions, more than {MAX_DIMS}")
            elif any(size < 0 for size in spec.shape):
                problems.append(f"{spec.name}: negative size in {spec.shape}")
            elif prod(max(size, 1) for size in spec.shape) * ITEMSIZE[spec.dtype] > MAX_NBYTES:
                problems.append(f"{spec.name}: {spec.shape} of {spec.dtype} exceeds the memory of any machine")
        if not problems and sum(align(spec.nbytes) for spec in specs) > MAX_NBYTES:
            problems.append("the tensors together exceed the memory of any machine")
        if problems:
            raise PlanError(f"the specs cannot be laid out: {listed(problems)}")
        offsets = []
        end = 0
        for spec in specs:
            offsets.append(end)
            end += align(spec.nbytes)
        return cls(tuple(specs), tuple(offsets), end)

    @cached_property
    def index(self) -> dict[str, int]:
        return {spec.name: position for position, spec in enumerate(self.specs)}

    @cached_property
    def shapes(self) -> npt.NDArray[np.int64]:
        """One row per tensor, one column per dimension of the widest; 1 where a tensor has no such dimension."""
        width = max((len(spec.shape) for spec in self.specs), default=0)
        ones = (1,) * width
        rows = [(*spec.shape, *ones[len(spec.shape) :]) for spec in self.specs]
        return np.array(rows, np.int64).reshape(len(rows), width)

    @cached_property
    def strides(self) -> npt.NDArray[np.int64]:
        """Bytes from one index to the next, in the columns of `shapes`."""
        below = np.column_stack([self.shapes[:, 1:], self.itemsizes])[:, : self.shapes.shape[1]]
        strides: npt.NDArray[np.int64] = np.cumprod(below[:, ::-1], axis=1)[:, ::-1]
        return strides

    @cached_property
    def itemsizes(self) -> npt.NDArray[np.int64]:
        return np.array([ITEMSIZE[spec.dtype] for spec in self.specs], np.int64)

    @cached_property
    def bases(self) -> npt.NDArray[np.int64]:
        """`offsets` as an array: [tensors]."""
        return np.array(self.offsets, np.int64)

    @cached_property
    def digest(self) -> str:
        """32 hexadecimal digits that differ when any name, shape, dtype or offset differs."""
        return xxhash.xxh3_128_hexdigest(self.encode())

    @cached_property
    def payload_nbytes(self) -> int:
        """Bytes of tensors alone, without the gaps of alignment."""
        return sum(spec.nbytes for spec in self.specs)

    def __iter__(self) -> Iterator[tuple[TensorSpec, int]]:
        return iter(zip(self.specs, self.offsets, strict=True))

    def encode(self) -> bytes:
        return msgspec.msgpack.encode([[spec.name, spec.shape, spec.dtype] for spec in self.specs])

    @classmethod
    def decode(cls, data: bytes) -> Layout:
        """Undo `encode`. Raises PlanError for other bytes."""
        rows = unpacked(data, list[tuple[str, tuple[int, ...], str]], "an encoded layout", PlanError)
        return cls.of([TensorSpec(name=name, shape=shape, dtype=dtype) for name, shape, dtype in rows])
