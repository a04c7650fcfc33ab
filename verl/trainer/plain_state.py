"""Batches as plain values and tensors, which `torch.load(weights_only=True)` reads: reading them back runs no code.

A value is itself, or a pair of what it is and what it is made of: `("dict", [(key, value), ...])`.
"""

from __future__ import annotations

import datetime
import io
import warnings
from collections.abc import Callable
from decimal import Decimal
from typing import Any

import numpy as np
import torch

from verl.protocol import DataProto
from verl.utils.config import ConfigError
from verl.utils.pictures import FrameLimits, Picture, PictureError, Video, restored

_AS_THEY_ARE = (type(None), bool, int, float, str, bytes)


def to_plain(value: Any) -> Any:
    """Convert to plain values. Raises TypeError for a value that is no tensor, array or type of parquet's."""
    if type(value) in _AS_THEY_ARE:
        return value
    if isinstance(value, torch.Tensor):
        return "tensor", value.detach().cpu().clone()
    if isinstance(value, DataProto):
        tensors = {} if value.batch is None else {str(key): tensor for key, tensor in value.batch.items()}
        return "batch", [to_plain(part) for part in (tensors, value.non_tensor_batch, value.meta_info)]
    if isinstance(value, dict):
        return "dict", [(to_plain(key), to_plain(item)) for key, item in value.items()]
    if isinstance(value, (list, tuple)):
        return ("list" if isinstance(value, list) else "tuple"), [to_plain(item) for item in value]
    if isinstance(value, np.ndarray) and value.dtype == object:
        return "objects", [list(value.shape), [to_plain(item) for item in value.ravel().tolist()]]
    if isinstance(value, (np.ndarray, np.generic)):
        array = np.asarray(value)
        kind = "array" if isinstance(value, np.ndarray) else "scalar"
        return kind, [array.dtype.str, list(array.shape), array.tobytes()]
    if isinstance(value, Picture):
        return "picture", [value.path, value.digest, *value.limits]
    if isinstance(value, Video):
        files = [to_plain(file) for file in value.files]
        return "video", [files, value.in_frames, value.rate, *value.limits]
    for name, (cls, write, _) in _WRITTEN.items():
        if type(value) is cls:
            return name, write(value)
    raise TypeError(f"a checkpoint cannot hold {str(value)[:80]!r}, which is a {type(value).__name__}")


def from_plain(value: Any) -> Any:
    """The inverse of `to_plain`. Raises ConfigError for anything that it does not return, and for a picture whose file
    is gone."""
    if type(value) in _AS_THEY_ARE:
        return value
    try:
        kind, content = value
        return _READ[kind](content)
    except ConfigError:  # of a part
        raise
    except PictureError as exc:
        raise ConfigError(f"a picture of the checkpoint's samples {exc}") from exc
    except (KeyError, TypeError, ValueError, ArithmeticError, AttributeError, RuntimeError) as exc:
        raise ConfigError(f"the checkpoint holds something that is no part of a batch: {str(value)[:80]!r}") from exc


def packed(value: Any) -> bytes:
    """Bytes of `to_plain(value)`, for `unpacked`. Raises its TypeError."""
    target = io.BytesIO()
    torch.save(to_plain(value), target)
    return target.getvalue()


def unpacked(payload: bytes) -> Any:
    """Raises ConfigError for anything that `packed` does not return."""
    try:
        with warnings.catch_warnings(action="ignore"):
            plain = torch.load(io.BytesIO(payload), weights_only=True, map_location="cpu")
    except Exception as exc:  # torch's reader raises whatever it stumbles over
        raise ConfigError((str(exc).splitlines() or [type(exc).__name__])[0]) from exc
    return from_plain(plain)


def _batch(parts: Any) -> DataProto:
    tensors, objects, meta_info = (from_plain(part) for part in parts)
    return DataProto.from_dict(tensors, objects, meta_info)


def _objects(content: Any) -> np.ndarray:
    shape, items = content
    array = np.empty(len(items), dtype=object)
    for position, item in enumerate(items):
        array[position] = from_plain(item)
    return array.reshape(shape)


def _array(content: Any) -> np.ndarray:
    dtype, shape, data = content
    return np.frombuffer(data, dtype=np.dtype(dtype)).reshape(shape).copy()


def _tensor(content: Any) -> torch.Tensor:
    if not isinstance(content, torch.Tensor):
        raise TypeError(content)
    return content


def _video(content: Any) -> Video:
    files, in_frames, rate, *limits = content
    return Video(tuple(from_plain(file) for file in files), in_frames, rate, FrameLimits(*limits))


_WRITTEN: dict[str, tuple[type, Callable[[Any], str], Callable[[str], Any]]] = {
    "datetime": (datetime.datetime, datetime.datetime.isoformat, datetime.datetime.fromisoformat),
    "date": (datetime.date, datetime.date.isoformat, datetime.date.fromisoformat),
    "time": (datetime.time, datetime.time.isoformat, datetime.time.fromisoformat),
    "timedelta": (
        datetime.timedelta,
        lambda value: str(value // datetime.timedelta(microseconds=1)),
        lambda text: datetime.timedelta(microseconds=int(text)),
    ),
    "decimal": (Decimal, str, Decimal),
}
"""Parquet's kinds beside numbers and texts: name, class, how it is written and read."""

_READ: dict[str, Callable[[Any], Any]] = {
    "tensor": _tensor,
    "batch": _batch,
    "dict": lambda items: {from_plain(key): from_plain(item) for key, item in items},
    "list": lambda items: [from_plain(item) for item in items],
    "tuple": lambda items: tuple(from_plain(item) for item in items),
    "objects": _objects,
    "array": _array,
    "scalar": lambda content: _array(content)[()],
    "picture": lambda content: restored(*content),
    "video": _video,
    **{name: read for name, (_, _, read) in _WRITTEN.items()},
}
