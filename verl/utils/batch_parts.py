"""The parts of a `DataProto`: arrays of objects, positions, and tensors that are pickled as bytes."""

from __future__ import annotations

import pickle
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch


def object_array(values: Any) -> np.ndarray:
    """One object per sample. `np.array(..., dtype=object)` would turn lists of equal length into a matrix."""
    if isinstance(values, np.ndarray) and values.dtype == object and values.ndim == 1:
        return values
    array = np.empty(len(values), dtype=object)
    for position, value in enumerate(values):
        array[position] = value
    return array


def positions(index: Any, size: int) -> np.ndarray:
    array = index.cpu().numpy() if isinstance(index, torch.Tensor) else np.asarray(index)
    if array.ndim != 1:
        raise TypeError(f"index with a slice, a list or a one-dimensional array, not {index!r}")
    if array.dtype == bool:
        if len(array) != size:
            raise IndexError(f"a mask of {len(array)} entries for {size} samples")
        return np.flatnonzero(array)
    array = array.astype(np.int64)
    if array.size and not (-size <= array.min() and array.max() < size):
        raise IndexError(f"positions {array.min()}..{array.max()} for {size} samples")
    return array


def unfolded(key: str, values: Any, parts: int) -> Any:
    """`values` [B, parts * m, ...] as [B * parts, m, ...]; objects are sequences of `parts` * m. Raises ValueError."""
    if isinstance(values, torch.Tensor):
        if values.ndim < 2 or values.shape[1] % parts:
            raise ValueError(
                f"{key!r} {list(values.shape)} cannot be cut into {parts} parts along its second dimension"
            )
        return values.reshape(values.shape[0] * parts, values.shape[1] // parts, *values.shape[2:])
    if odd := [len(value) for value in values if len(value) % parts]:
        raise ValueError(f"{key!r} has an object of {odd[0]} elements, which cannot be cut into {parts} parts")
    sizes = [len(value) // parts for value in values]
    return object_array(
        [
            value[part * size : (part + 1) * size]
            for value, size in zip(values, sizes, strict=True)
            for part in range(parts)
        ]
    )


def described(value: Any) -> str:
    """The type of a value and of its elements, as text."""
    if isinstance(value, torch.Tensor | np.ndarray) and value.dtype != object:
        return f"{type(value).__name__} {list(value.shape)} {value.dtype}"
    if isinstance(value, Mapping):
        return f"{type(value).__name__} {{{', '.join(f'{key}: {described(of)}' for key, of in value.items())}}}"
    if isinstance(value, list | tuple | np.ndarray):
        kinds = ", ".join(dict.fromkeys(map(described, value)))
        return f"{type(value).__name__} of {len(value)}{': ' if kinds else ''}{kinds}"
    return type(value).__name__


def object_nbytes(values: Any) -> int:
    """The approximate size of an array of objects: that of its pickle."""
    return len(pickle.dumps(values))


def without(values: Mapping[str, Any], keys: Sequence[str]) -> dict[str, Any]:
    return {key: value for key, value in values.items() if key not in keys}


def merge(kind: str, ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> dict[str, Any]:
    differing = [key for key in theirs if key in ours and not equal(ours[key], theirs[key])]
    if differing:
        raise ValueError(f"{kind} has other values under {differing} in one part than in another")
    return {**ours, **theirs}


def equal(a: Any, b: Any) -> bool:
    """Equality of nested containers of tensors, arrays and plain objects; NaN equals NaN."""
    if a is b:
        return True
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        if a.shape != b.shape or a.dtype != b.dtype:
            return False
        return torch.allclose(a, b, rtol=0, atol=0, equal_nan=True) if a.is_floating_point() else torch.equal(a, b)
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(equal(value, b[key]) for key, value in a.items())
    if isinstance(a, np.ndarray) and isinstance(b, np.ndarray) and a.dtype != object:
        return a.dtype == b.dtype and np.array_equal(a, b)
    if isinstance(a, np.ndarray | list | tuple) and type(a) is type(b):
        return len(a) == len(b) and all(equal(x, y) for x, y in zip(a, b, strict=True))
    if any(isinstance(value, np.ndarray | torch.Tensor) for value in (a, b)):
        return False
    return bool(a == b) or bool(a != a and b != b)


def collect_metrics(parts: Sequence[Mapping[str, Any]]) -> dict[str, list[Any]]:
    collected: dict[str, list[Any]] = {}
    for part in parts:
        for key, value in part.items():
            collected.setdefault(key, []).extend(value if isinstance(value, list) else [value])
    return collected


def to_bytes(tensor: torch.Tensor) -> tuple[np.ndarray, torch.dtype, tuple[int, ...]]:
    flat = tensor.detach().cpu().contiguous().flatten()
    return flat.view(torch.uint8).numpy(), tensor.dtype, tuple(tensor.shape)


def from_bytes(array: np.ndarray, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    # Copied because Ray hands out read-only memory, and writing to it would be a segmentation fault.
    tensor = torch.empty(shape, dtype=dtype)
    tensor.flatten().view(torch.uint8).numpy()[:] = array
    return tensor
