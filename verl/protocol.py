"""`DataProto`: the one batch type that travels between the driver and the worker groups.

A `DataProto` of length N holds N samples: tensors of shape [N, ...] in `batch`, one Python object per sample in each
array of `non_tensor_batch`, and facts about the batch as a whole in `meta_info`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict

Index = slice | Sequence[int] | Sequence[bool] | np.ndarray | torch.Tensor


@dataclass(eq=False)
class DataProto:
    """N samples. Every tensor and every array has N as its first dimension; anything else is a ValueError.

    Methods return new objects that may share memory with this one (a slice is a view, an index array copies), except
    `union`, `reorder` and `pop`, which change this object: both `data.union(x)` and `data = data.union(x)` work.
    Pickled, a `DataProto` carries exactly its own rows, detached; unpickled, its tensors are writable and on the CPU.
    """

    batch: TensorDict | None = None
    non_tensor_batch: dict[str, np.ndarray] = field(default_factory=dict)
    """One-dimensional object arrays; lists and other arrays given to the constructor become such arrays."""
    meta_info: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.batch is not None:
            if self.batch.batch_dims != 1:
                raise ValueError(f"batch must have one batch dimension, not batch_size={list(self.batch.batch_size)}")
            nested = [key for key, value in self._tensors().items() if not isinstance(value, torch.Tensor)]
            if nested:
                raise ValueError(f"batch holds something else than tensors under {nested}: use non_tensor_batch")
        self.non_tensor_batch = {key: _object_array(values) for key, values in self.non_tensor_batch.items()}
        for key, values in self.non_tensor_batch.items():
            if len(values) != len(self):
                raise ValueError(f"non_tensor_batch[{key!r}] has {len(values)} entries, the batch has {len(self)}")

    @classmethod
    def from_dict(
        cls,
        tensors: Mapping[str, torch.Tensor] | None = None,
        non_tensors: Mapping[str, Any] | None = None,
        meta_info: Mapping[str, Any] | None = None,
    ) -> DataProto:
        """Tensors of shape [N, ...] and sequences of N objects. Raises ValueError naming keys and sizes that differ."""
        tensors, batch = dict(tensors or {}), None
        if tensors:
            sizes = {key: value.shape[0] if value.ndim else None for key, value in tensors.items()}
            if len(set(sizes.values())) != 1 or None in sizes.values():
                raise ValueError(f"tensors differ in their first dimension: {sizes}")
            batch = TensorDict(tensors, batch_size=[next(value.shape[0] for value in tensors.values())])
        return cls(batch=batch, non_tensor_batch=dict(non_tensors or {}), meta_info=dict(meta_info or {}))

    @classmethod
    def from_single_dict(cls, data: Mapping[str, Any], meta_info: Mapping[str, Any] | None = None) -> DataProto:
        """As `from_dict`: what is a tensor goes to `batch`, everything else to `non_tensor_batch`."""
        tensors = {key: value for key, value in data.items() if isinstance(value, torch.Tensor)}
        return cls.from_dict(tensors, {key: value for key, value in data.items() if key not in tensors}, meta_info)

    def __len__(self) -> int:
        if self.batch is not None:
            return int(self.batch.batch_size[0])
        return len(next(iter(self.non_tensor_batch.values()), ()))

    def __getitem__(self, index: Index) -> DataProto:
        """The samples of a slice, of an array of positions (may repeat), or of a boolean mask; `meta_info` is kept."""
        if not isinstance(index, slice):
            index = _positions(index, len(self))
        batch = None
        if self.batch is not None:
            batch = self.batch[index if isinstance(index, slice) else torch.from_numpy(index)]
        return self._replace(batch, {key: values[index] for key, values in self.non_tensor_batch.items()})

    def select(
        self,
        batch_keys: Sequence[str] | None = None,
        non_tensor_batch_keys: Sequence[str] | None = None,
        meta_info_keys: Sequence[str] | None = None,
    ) -> DataProto:
        """Only the named parts; None keeps all of a kind. Raises KeyError naming every key that is not there."""
        self._require(batch_keys, non_tensor_batch_keys, meta_info_keys)
        batch = self.batch
        if batch is not None and batch_keys is not None:
            batch = batch.select(*batch_keys)
        objects, meta = self.non_tensor_batch, self.meta_info
        return DataProto(
            batch,
            dict(objects) if non_tensor_batch_keys is None else {key: objects[key] for key in non_tensor_batch_keys},
            dict(meta) if meta_info_keys is None else {key: meta[key] for key in meta_info_keys},
        )

    def pop(
        self,
        batch_keys: Sequence[str] = (),
        non_tensor_batch_keys: Sequence[str] = (),
        meta_info_keys: Sequence[str] = (),
    ) -> DataProto:
        """Take the named parts out of this object. Raises KeyError as `select` does, and then takes nothing."""
        popped = self.select(batch_keys, non_tensor_batch_keys, meta_info_keys)
        if self.batch is not None:
            self.batch = self.batch.exclude(*batch_keys)
        self.non_tensor_batch = _without(self.non_tensor_batch, non_tensor_batch_keys)
        self.meta_info = _without(self.meta_info, meta_info_keys)
        return popped

    def union(self, other: DataProto) -> DataProto:
        """Add the keys of `other`, a batch of the same samples, to this object and return it.

        A key that both have must have equal values; otherwise ValueError naming it, and nothing is changed.
        """
        holds_rows = other.batch is not None or other.non_tensor_batch
        if holds_rows and (self.batch is not None or self.non_tensor_batch) and len(other) != len(self):
            raise ValueError(f"union of {len(self)} samples with {len(other)} samples")
        tensors = _merge("batch", self._tensors(), other._tensors())
        non_tensors = _merge("non_tensor_batch", self.non_tensor_batch, other.non_tensor_batch)
        meta_info = _merge("meta_info", self.meta_info, other.meta_info)
        if other.batch is not None:
            self.batch = TensorDict(tensors, batch_size=other.batch.batch_size)
        self.non_tensor_batch, self.meta_info = non_tensors, meta_info
        return self

    def reorder(self, indices: Sequence[int] | np.ndarray | torch.Tensor) -> DataProto:
        """Put the sample `indices[i]` at place i, in this object, and return it. `indices` is a permutation."""
        positions = _positions(indices, len(self))
        if not np.array_equal(np.sort(positions), np.arange(len(self))):
            raise ValueError(f"reorder needs a permutation of {len(self)} samples, not {positions.tolist()[:16]}...")
        ordered = self[positions]
        self.batch, self.non_tensor_batch = ordered.batch, ordered.non_tensor_batch
        return self

    def repeat(self, n: int, interleave: bool = True) -> DataProto:
        """Every sample n times: a a b b when interleaved, else a b a b."""
        rows = np.arange(len(self))
        return self[np.repeat(rows, n) if interleave else np.tile(rows, n)]

    def split(self, size: int) -> list[DataProto]:
        """Consecutive parts of `size` samples; the last may be shorter."""
        if size < 1:
            raise ValueError(f"split into parts of {size} samples")
        return [self[start : start + size] for start in range(0, len(self), size)]

    def chunk(self, n: int) -> list[DataProto]:
        """n consecutive parts of equal length. Raises ValueError when the length does not divide."""
        if n < 1 or len(self) % n:
            raise ValueError(f"{len(self)} samples cannot be split into {n} equal chunks")
        size = len(self) // n
        return [self[start * size : (start + 1) * size] for start in range(n)]

    @staticmethod
    def concat(parts: Sequence[DataProto]) -> DataProto:
        """The samples of all parts in order. All must have the same keys.

        `meta_info['metrics']`, a dict per part, becomes one dict of lists with the values of all parts; any other
        entry of `meta_info` must be equal in the parts that have it. Raises ValueError naming what differs.
        """
        if not parts:
            raise ValueError("concat of no parts")
        first, batch = parts[0], None
        for number, part in enumerate(parts):
            theirs, ours = part._signature(), first._signature()
            if theirs != ours:
                keys = sorted(key for key in theirs | ours if theirs.get(key) != ours.get(key))
                differing = {key: (ours.get(key, "missing"), theirs.get(key, "missing")) for key in keys}
                raise ValueError(f"part {number} differs from part 0: {differing}")
        if first.batch is not None:
            tensors = {key: torch.cat([part._tensors()[key] for part in parts]) for key in first._tensors()}
            batch = TensorDict(tensors, batch_size=[sum(len(part) for part in parts)])
        non_tensors = {
            key: np.concatenate([part.non_tensor_batch[key] for part in parts]) for key in first.non_tensor_batch
        }
        meta_info: dict[str, Any] = {}
        for part in parts:
            meta_info = _merge("meta_info", meta_info, _without(part.meta_info, ["metrics"]))
        if any("metrics" in part.meta_info for part in parts):
            meta_info["metrics"] = _collect_metrics([part.meta_info.get("metrics", {}) for part in parts])
        return DataProto(batch, non_tensors, meta_info)

    def to(self, device: torch.device | str) -> DataProto:
        """The same samples with all tensors on `device`."""
        return self._replace(None if self.batch is None else self.batch.to(device), dict(self.non_tensor_batch))

    def _replace(self, batch: TensorDict | None, non_tensor_batch: dict[str, np.ndarray]) -> DataProto:
        return DataProto(batch, non_tensor_batch, dict(self.meta_info))

    def _tensors(self) -> dict[str, Any]:
        return {} if self.batch is None else dict(self.batch.items())

    def _signature(self) -> dict[str, str]:
        """What two parts must have in common to be one batch."""
        tensors = {key: f"{value.dtype} {list(value.shape[1:])}" for key, value in self._tensors().items()}
        return tensors | dict.fromkeys(self.non_tensor_batch, "objects")

    def _require(self, *keys_of_each_kind: Sequence[str] | None) -> None:
        held: dict[str, dict[str, Any]] = {
            "batch": self._tensors(),
            "non_tensor_batch": self.non_tensor_batch,
            "meta_info": self.meta_info,
        }
        for (kind, values), keys in zip(held.items(), keys_of_each_kind, strict=True):
            missing = [key for key in keys or () if key not in values]
            if missing:
                raise KeyError(f"{kind} has no {missing}; it has {sorted(values)}")

    def __getstate__(self) -> dict[str, Any]:
        # Not torch's own pickling: it writes the whole storage behind a view, so one chunk would carry all chunks.
        # NumPy arrays of bytes travel through Ray's object store without a further copy.
        tensors = None
        if self.batch is not None:
            tensors = {key: _to_bytes(value) for key, value in self._tensors().items()}
        return {
            "size": len(self),
            "tensors": tensors,
            "non_tensor_batch": self.non_tensor_batch,
            "meta_info": self.meta_info,
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.batch = None
        if state["tensors"] is not None:
            tensors = {key: _from_bytes(*value) for key, value in state["tensors"].items()}
            self.batch = TensorDict(tensors, batch_size=[state["size"]])
        self.non_tensor_batch, self.meta_info = state["non_tensor_batch"], state["meta_info"]


def tensors_of(data: DataProto) -> TensorDict:
    """`data.batch`, where there has to be one. Raises ValueError if there is none."""
    if data.batch is None:
        raise ValueError("the batch holds no tensors")
    return data.batch


def pad_dataproto_to_divisor(data: DataProto, n: int) -> tuple[DataProto, int]:
    """Repeat samples from the start until the length is a multiple of n. Returns the data and how many were added."""
    if not len(data):
        raise ValueError(f"an empty batch cannot be padded to a multiple of {n}")
    pad_size = -len(data) % n
    return (data[np.arange(len(data) + pad_size) % len(data)] if pad_size else data), pad_size


def unpad_dataproto(data: DataProto, pad_size: int) -> DataProto:
    """Drop the last `pad_size` samples: the inverse of `pad_dataproto_to_divisor`."""
    return data[: len(data) - pad_size] if pad_size else data


def _object_array(values: Any) -> np.ndarray:
    """One object per sample. `np.array(..., dtype=object)` would turn lists of equal length into a matrix."""
    if isinstance(values, np.ndarray) and values.dtype == object and values.ndim == 1:
        return values
    array = np.empty(len(values), dtype=object)
    for position, value in enumerate(values):
        array[position] = value
    return array


def _positions(index: Any, size: int) -> np.ndarray:
    array = index.cpu().numpy() if isinstance(index, torch.Tensor) else np.asarray(index)
    if array.ndim != 1:
        raise TypeError(f"index with a slice, a list or a one-dimensional array, not {index!r}; one: data[i : i + 1]")
    if array.dtype == bool:
        if len(array) != size:
            raise IndexError(f"a mask of {len(array)} entries for {size} samples")
        return np.flatnonzero(array)
    array = array.astype(np.int64)
    if array.size and not (-size <= array.min() and array.max() < size):
        raise IndexError(f"positions {array.min()}..{array.max()} for {size} samples")
    return array


def _without(values: Mapping[str, Any], keys: Sequence[str]) -> dict[str, Any]:
    return {key: value for key, value in values.items() if key not in keys}


def _merge(kind: str, ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> dict[str, Any]:
    differing = [key for key in theirs if key in ours and not _equal(ours[key], theirs[key])]
    if differing:
        raise ValueError(f"{kind} has other values under {differing} in one part than in another")
    return {**ours, **theirs}


def _equal(a: Any, b: Any) -> bool:
    """Equality of nested containers of tensors, arrays and plain objects; NaN equals NaN."""
    if a is b:
        return True
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        if a.shape != b.shape or a.dtype != b.dtype:
            return False
        return torch.allclose(a, b, rtol=0, atol=0, equal_nan=True) if a.is_floating_point() else torch.equal(a, b)
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(_equal(value, b[key]) for key, value in a.items())
    if isinstance(a, np.ndarray) and isinstance(b, np.ndarray) and a.dtype != object:
        return a.dtype == b.dtype and np.array_equal(a, b)
    if isinstance(a, np.ndarray | list | tuple) and type(a) is type(b):
        return len(a) == len(b) and all(_equal(x, y) for x, y in zip(a, b, strict=True))
    if any(isinstance(value, np.ndarray | torch.Tensor) for value in (a, b)):
        return False
    return bool(a == b) or bool(a != a and b != b)


def _collect_metrics(parts: Sequence[Mapping[str, Any]]) -> dict[str, list[Any]]:
    collected: dict[str, list[Any]] = {}
    for part in parts:
        for key, value in part.items():
            collected.setdefault(key, []).extend(value if isinstance(value, list) else [value])
    return collected


def _to_bytes(tensor: torch.Tensor) -> tuple[np.ndarray, torch.dtype, tuple[int, ...]]:
    flat = tensor.detach().cpu().contiguous().flatten()
    return flat.view(torch.uint8).numpy(), tensor.dtype, tuple(tensor.shape)


def _from_bytes(array: np.ndarray, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    # Copied because Ray hands out read-only memory, and writing to it would be a segmentation fault.
    tensor = torch.empty(shape, dtype=dtype)
    tensor.flatten().view(torch.uint8).numpy()[:] = array
    return tensor
