"""The tensors of safetensors files, checked before a byte is loaded. It reads headers only; no torch.

A tensor-parallel sharded checkpoint declares itself in every file, in the free-form `__metadata__` of the format (a map
of strings), under the key `verl.tensor_parallel`, as JSON:

    {"rank": 0, "size": 2, "dims": {"model.layers.0.mlp.up_proj.weight": 0, "model.norm.weight": null}}

Of a tensor with a dimension, the file holds slice `rank` of `size`; slices are concatenated along that dimension and
may differ in length. `null` means that all files hold the same values; those of rank 0 are loaded. A tensor outside
`dims` is whole and in one file only.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import msgspec

from ..errors import ConfigError
from ..plan.encoded import UNREADABLE
from ..plan.layout import MAX_DIMS
from ..plan.types import ITEMSIZE
from ..support.files import open_regular, real

DTYPES = {
    "F64": "float64",
    "F32": "float32",
    "F16": "float16",
    "BF16": "bfloat16",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2",
    "I64": "int64",
    "I32": "int32",
    "I16": "int16",
    "I8": "int8",
    "U8": "uint8",
    "BOOL": "bool",
}
"""torch's names of the format's dtypes."""
TENSOR_PARALLEL = "verl.tensor_parallel"
LENGTH_NBYTES = 8
"""A file begins with the little-endian length of its header; the JSON header and the data follow."""
MAX_HEADER_NBYTES = 100_000_000
"""The format's own limit: a file of another kind must not make us read gigabytes as JSON."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredTensor:
    """A tensor, or a slice of one, as it lies in one file: contiguous, at `offset` bytes from the file's start."""

    path: Path
    name: str
    shape: tuple[int, ...]
    dtype: str
    offset: int
    nbytes: int


class TensorParallel(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The declaration in a file of a tensor-parallel sharded checkpoint."""

    rank: int
    size: int
    dims: dict[str, int | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointTensor:
    """One whole tensor: its slices in order, to be concatenated along `dim`; or one slice."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    dim: int
    parts: tuple[StoredTensor, ...]

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * ITEMSIZE[self.dtype]


class _Malformed(Exception):
    """Why one file cannot be read."""


def read_checkpoint(files: Sequence[Path]) -> list[CheckpointTensor]:
    """Every tensor of `files`, in the order of the files and of the bytes in them.

    Raises ConfigError listing all problems: missing, malformed or truncated files (with expected and present bytes),
    tensors in two files, unknown dtypes, slices that do not make a whole tensor.
    """
    problems: list[str] = []
    found: dict[str, list[tuple[TensorParallel | None, StoredTensor]]] = {}
    for path in files:
        try:
            declared, tensors = _read_header(path)
        except _Malformed as exc:
            problems.append(f"{path}: {exc}")
        except (OSError, ValueError) as exc:  # no file; a name with a NUL
            problems.append(f"{path}: {getattr(exc, 'strerror', None) or exc}")
        else:
            for tensor in tensors:
                found.setdefault(tensor.name, []).append((declared, tensor))
    whole = []
    for name, slices in found.items():
        try:
            whole.append(_join(name, slices))
        except _Malformed as exc:
            problems.append(f"{name}: {exc}")
    if problems:
        raise ConfigError(f"the checkpoint cannot be loaded: {'; '.join(problems)}")
    return whole


def split_files(files: Sequence[Path], num_ranks: int) -> list[list[Path]]:
    """Divide `files` among ranks so that their bytes are about equal. Files with slices of one tensor stay together.

    Every rank computes the same division. Raises ConfigError as `read_checkpoint`.
    """
    group_of = {path: {path} for path in files}
    for tensor in read_checkpoint(files):
        together = set.union(*(group_of[part.path] for part in tensor.parts))
        for path in together:
            group_of[path] = together
    groups = {id(group): sorted(group, key=files.index) for group in group_of.values()}
    nbytes = {key: sum(path.stat().st_size for path in group) for key, group in groups.items()}
    ranks: list[list[Path]] = [[] for _ in range(num_ranks)]
    loads = [0] * num_ranks
    for key in sorted(groups, key=lambda key: -nbytes[key]):
        rank = loads.index(min(loads))
        ranks[rank] += groups[key]
        loads[rank] += nbytes[key]
    return [sorted(mine, key=files.index) for mine in ranks]


def _read_header(path: Path) -> tuple[TensorParallel | None, list[StoredTensor]]:
    """Raises _Malformed or OSError."""
    with os.fdopen(open_regular(real(path)), "rb") as file:
        size = os.fstat(file.fileno()).st_size
        length = int.from_bytes(file.read(LENGTH_NBYTES), "little")
        start = LENGTH_NBYTES + length
        if size < LENGTH_NBYTES or start > size and length <= MAX_HEADER_NBYTES:
            raise _Malformed(f"truncated inside the header: {max(start, LENGTH_NBYTES)} bytes expected, {size} there")
        if length > MAX_HEADER_NBYTES:
            raise _Malformed(f"not a safetensors file: its header would have {length} bytes, the file has {size}")
        text = file.read(length)
    try:
        header = msgspec.json.decode(text, type=dict[str, dict[str, Any]])
        declared = _declaration(header.pop("__metadata__", {}))
        tensors = [_entry(path, name, entry, start) for name, entry in header.items()]
    except UNREADABLE as exc:
        raise _Malformed(f"not a safetensors file: {exc}") from exc
    tensors.sort(key=lambda tensor: (tensor.offset, tensor.nbytes))
    end = start
    for tensor in tensors:
        if tensor.offset != end:
            raise _Malformed(f"malformed: {tensor.name} begins at byte {tensor.offset}, expected at {end}")
        end += tensor.nbytes
    if size != end:
        state = "truncated" if size < end else "malformed"
        raise _Malformed(f"{state}: {end} bytes expected, {size} there")
    return declared, tensors


class _Entry(msgspec.Struct):
    dtype: str
    shape: tuple[int, ...]
    data_offsets: tuple[int, int]


def _entry(path: Path, name: str, entry: dict[str, Any], start: int) -> StoredTensor:
    stored = msgspec.convert(entry, _Entry)
    if stored.dtype not in DTYPES:
        raise _Malformed(f"{name} has the unknown dtype {stored.dtype}; known: {', '.join(DTYPES)}")
    dtype = DTYPES[stored.dtype]
    if len(stored.shape) > MAX_DIMS:
        raise _Malformed(f"malformed: {name} has {len(stored.shape)} dimensions, more than {MAX_DIMS}")
    begin, end = stored.data_offsets
    nbytes = prod(stored.shape) * ITEMSIZE[dtype]
    if any(extent < 0 for extent in stored.shape) or end - begin != nbytes:
        raise _Malformed(f"malformed: {name} {list(stored.shape)} {dtype} has {nbytes} bytes, not {end - begin}")
    return StoredTensor(path=path, name=name, shape=stored.shape, dtype=dtype, offset=start + begin, nbytes=nbytes)


def _declaration(metadata: dict[str, Any]) -> TensorParallel | None:
    if TENSOR_PARALLEL not in metadata:
        return None
    try:
        declared = msgspec.json.decode(metadata[TENSOR_PARALLEL], type=TensorParallel)
    except UNREADABLE as exc:
        raise _Malformed(f"the metadata {TENSOR_PARALLEL!r} are not what they should be: {exc}") from exc
    if not 0 <= declared.rank < declared.size:
        raise _Malformed(f"the metadata {TENSOR_PARALLEL!r} name rank {declared.rank} of {declared.size}")
    return declared


def _join(name: str, slices: list[tuple[TensorParallel | None, StoredTensor]]) -> CheckpointTensor:
    """Raises _Malformed if the slices do not make one tensor."""
    sharded = [(declared, part) for declared, part in slices if declared is not None and name in declared.dims]
    if len(sharded) < len(slices):
        if len(slices) > 1:
            raise _Malformed(f"in more than one file: {', '.join(str(part.path) for _, part in slices)}")
        return _whole(slices[0][1])
    ranks = sorted(declared.rank for declared, _ in sharded)
    sizes = {declared.size for declared, _ in sharded}
    dims = {declared.dims[name] for declared, _ in sharded}
    if len(sizes) > 1 or len(dims) > 1 or ranks != list(range(next(iter(sizes)))):
        listed = "; ".join(f"rank {d.rank} of {d.size} along {d.dims[name]} in {part.path}" for d, part in sharded)
        raise _Malformed(f"its slices are not one of each rank: {listed}")
    parts = tuple(part for _, part in sorted(sharded, key=lambda pair: pair[0].rank))
    dim, first = next(iter(dims)), parts[0]
    rest = {(part.dtype, len(part.shape), _without(part.shape, dim)) for part in parts}
    if len(rest) > 1 or (dim is not None and not 0 <= dim < len(first.shape)):
        listed = "; ".join(f"{list(part.shape)} {part.dtype} in {part.path}" for part in parts)
        raise _Malformed(f"its slices do not fit together along {dim}: {listed}")
    if dim is None:
        return _whole(first)
    extent = sum(part.shape[dim] for part in parts)
    shape = (*first.shape[:dim], extent, *first.shape[dim + 1 :])
    return CheckpointTensor(name=name, shape=shape, dtype=first.dtype, dim=dim, parts=parts)


def _whole(part: StoredTensor) -> CheckpointTensor:
    return CheckpointTensor(name=part.name, shape=part.shape, dtype=part.dtype, dim=0, parts=(part,))


def _without(shape: tuple[int, ...], dim: int | None) -> tuple[int, ...]:
    return shape if dim is None else tuple(extent for index, extent in enumerate(shape) if index != dim)
