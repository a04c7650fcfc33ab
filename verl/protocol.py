"""`DataProto`: the one batch type that travels between the driver and the worker groups.

A `DataProto` of length N has N samples: tensors of shape [N, ...] in `batch`, one Python object per sample in each
array of `non_tensor_batch`, and facts about the whole batch in `meta_info`.
"""

from __future__ import annotations

import copy
import pickle
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, overload

import numpy as np
import torch
from tensordict import TensorDict
from tensordict.tensorclass import NonTensorData, NonTensorStack
from torch.utils.data import DataLoader

from verl.utils.batch_parts import (
    collect_metrics,
    described,
    from_bytes,
    merge,
    object_array,
    object_nbytes,
    positions,
    to_bytes,
    unfolded,
    without,
)

AUTO_PADDING = "auto_padding"
PADDING = "__padding__"
"""A column without tensors: which rows only fill up a batch, and count nowhere."""
"""Key of `meta_info`: a batch marked true here is padded to a multiple of the ranks, and the result is unpadded."""
Index = slice | Sequence[int] | Sequence[bool] | np.ndarray | torch.Tensor


@dataclass(eq=False)
class DataProtoItem:
    """One sample: its tensors without the first dimension, its objects, and the facts about its batch."""

    batch: TensorDict | None = None
    non_tensor_batch: dict[str, Any] = field(default_factory=dict)
    meta_info: dict[str, Any] = field(default_factory=dict)


@dataclass(eq=False)
class DataProto:
    """N samples. Every tensor and every array has N as its first dimension; anything else is a ValueError.

    Methods return new objects that may share memory with this one (a slice is a view, an index array copies), except
    `union`, `reorder`, `rename`, `to`, `padding` and `pop`, which change this object: both `data.union(x)` and
    `data = data.union(x)` work.
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
        self.non_tensor_batch = {key: object_array(values) for key, values in self.non_tensor_batch.items()}
        self.check_consistency()

    def check_consistency(self) -> None:
        """Raises ValueError unless every tensor and array has one entry per sample.

        For callers that have changed `batch` or `non_tensor_batch` directly.
        """
        for key, values in self.non_tensor_batch.items():
            if len(values) != len(self):
                raise ValueError(f"non_tensor_batch[{key!r}] has {len(values)} entries, the batch has {len(self)}")

    def get_data_info(self) -> str:
        """A line for each tensor, column of objects and fact, with its type and shape."""
        kinds = {"batch": self._tensors(), "non_tensor_batch": self.non_tensor_batch, "meta_info": self.meta_info}
        return "\n".join(
            f"{kind}[{key!r}]: {described(value)}" for kind, values in kinds.items() for key, value in values.items()
        )

    @property
    def nbytes(self) -> int:
        """The size of tensors and objects, of these approximately."""
        return sum(self._sizes())

    def _sizes(self) -> tuple[int, int]:
        tensors = sum(value.nbytes for value in self._tensors().values())
        return tensors, sum(map(object_nbytes, self.non_tensor_batch.values()))

    def print_size(self, prefix: str = "") -> None:
        """Write the size of tensors and objects to stdout, in GiB, behind `prefix`."""
        tensors, objects = (nbytes / 2**30 for nbytes in self._sizes())
        words = f"size of batch: {tensors:.6f} GiB, size of non_tensor_batch: {objects:.6f} GiB"
        sys.stdout.write(f"{prefix}{', ' if prefix else ''}{words}\n")

    @classmethod
    def from_dict(
        cls,
        tensors: Mapping[str, torch.Tensor] | None = None,
        non_tensors: Mapping[str, Any] | None = None,
        meta_info: Mapping[str, Any] | None = None,
        num_batch_dims: int = 1,
        auto_padding: bool = False,
    ) -> DataProto:
        """Tensors of shape [N, ...] and sequences of N objects. Raises ValueError naming keys and sizes that differ.

        With `auto_padding` the batch is padded if it does not divide over the ranks of a call.
        """
        if num_batch_dims != 1:
            raise ValueError(f"num_batch_dims={num_batch_dims}: a batch has one dimension of samples here")
        tensors, batch = dict(tensors or {}), None
        if tensors:
            sizes = {key: value.shape[0] if value.ndim else None for key, value in tensors.items()}
            if len(set(sizes.values())) != 1 or None in sizes.values():
                raise ValueError(f"tensors differ in their first dimension: {sizes}")
            batch = TensorDict(tensors, batch_size=[next(value.shape[0] for value in tensors.values())])
        return cls(batch=batch, non_tensor_batch=dict(non_tensors or {}), meta_info=_marked(meta_info, auto_padding))

    @classmethod
    def from_single_dict(
        cls, data: Mapping[str, Any], meta_info: Mapping[str, Any] | None = None, auto_padding: bool = False
    ) -> DataProto:
        """As `from_dict`: tensors go to `batch`, everything else to `non_tensor_batch`."""
        tensors = {key: value for key, value in data.items() if isinstance(value, torch.Tensor)}
        others = {key: value for key, value in data.items() if key not in tensors}
        return cls.from_dict(tensors, others, meta_info, auto_padding=auto_padding)

    @classmethod
    def from_tensordict(
        cls, tensor_dict: TensorDict, meta_info: Mapping[str, Any] | None = None, num_batch_dims: int = 1
    ) -> DataProto:
        """The inverse of `to_tensordict`."""
        found: dict[str, dict[str, Any]] = {"tensors": {}, "objects": {}, "meta": {}}
        for key in map(str, tensor_dict.keys()):
            value = tensor_dict.get(key)
            if isinstance(value, NonTensorStack):
                found["objects"][key] = value.tolist()
            elif isinstance(value, NonTensorData):
                found["meta"][key] = value.data
            else:
                found["tensors"][key] = value
        meta = {**found["meta"], **(meta_info or {})}
        return cls.from_dict(found["tensors"], found["objects"], meta, num_batch_dims)

    def to_tensordict(self) -> TensorDict:
        """One TensorDict of tensors, objects (one `NonTensorStack` per key) and `meta_info` (`NonTensorData`).

        Raises ValueError for a key that occurs in two of them.
        """
        objects = {key: NonTensorStack(*map(NonTensorData, values)) for key, values in self.non_tensor_batch.items()}
        meta = {key: NonTensorData(value) for key, value in self.meta_info.items()}
        if twice := sorted(
            key for key in {*objects, *meta} if sum(key in of for of in (self._tensors(), objects, meta)) > 1
        ):
            raise ValueError(f"{twice} would be there twice")
        return TensorDict({**self._tensors(), **objects, **meta}, batch_size=[len(self)])

    def save_to_disk(self, filepath: str | Path) -> None:
        """Write the samples to a file, for `load_from_disk`."""
        Path(filepath).write_bytes(pickle.dumps(self))

    @staticmethod
    def load_from_disk(filepath: str | Path) -> DataProto:
        """Read a file of `save_to_disk`. It is unpickled, so use only your own files."""
        data = pickle.loads(Path(filepath).read_bytes())  # noqa: S301 - the docstring says so
        if not isinstance(data, DataProto):
            raise TypeError(f"{filepath} holds {type(data).__name__}, not a DataProto")
        return data

    def __len__(self) -> int:
        if self.batch is not None:
            return int(self.batch.batch_size[0])
        return len(next(iter(self.non_tensor_batch.values()), ()))

    @overload
    def __getitem__(self, item: int) -> DataProtoItem: ...

    @overload
    def __getitem__(self, item: Index) -> DataProto: ...

    def __getitem__(self, item: Index | int) -> DataProto | DataProtoItem:
        """One sample; or those of a slice, of an array of positions (may repeat), or of a boolean mask."""
        if isinstance(item, int | np.integer):
            return self._item(int(item))
        return self.slice(item.start, item.stop, item.step) if isinstance(item, slice) else self.select_idxs(item)

    def _item(self, position: int) -> DataProtoItem:
        if not -len(self) <= position < len(self):
            raise IndexError(f"sample {position} of {len(self)}")
        objects = {key: values[position] for key, values in self.non_tensor_batch.items()}
        return DataProtoItem(None if self.batch is None else self.batch[position], objects, dict(self.meta_info))

    def slice(self, start: int | None = None, end: int | None = None, step: int | None = None) -> DataProto:
        """Samples `start` up to `end`, as a view; `meta_info` is kept."""
        part = slice(start, end, step)
        if step is not None and step < 0:  # tensors cannot be sliced backwards
            return self.select_idxs(range(len(self))[part])
        batch = None if self.batch is None else self.batch[part]
        return self._replace(batch, {key: values[part] for key, values in self.non_tensor_batch.items()})

    def select_idxs(self, idxs: Sequence[int] | Sequence[bool] | np.ndarray | torch.Tensor) -> DataProto:
        """A copy of the samples at these positions, which may repeat, or of those in a mask; `meta_info` is kept."""
        index = positions(idxs, len(self))
        batch = None if self.batch is None else self.batch[torch.from_numpy(index)]
        return self._replace(batch, {key: values[index] for key, values in self.non_tensor_batch.items()})

    def select(
        self,
        batch_keys: Sequence[str] | None = None,
        non_tensor_batch_keys: Sequence[str] | None = None,
        meta_info_keys: Sequence[str] | None = None,
        deepcopy: bool = False,
    ) -> DataProto:
        """A copy with the named parts only; None keeps all of a kind. Raises KeyError naming every missing key.

        With `deepcopy` they share no memory with this object.
        """
        self._require(batch_keys, non_tensor_batch_keys, meta_info_keys)
        batch = self.batch
        if batch is not None and batch_keys is not None:
            batch = batch.select(*batch_keys)
        objects, meta = self.non_tensor_batch, self.meta_info
        selected = DataProto(
            batch,
            dict(objects) if non_tensor_batch_keys is None else {key: objects[key] for key in non_tensor_batch_keys},
            dict(meta) if meta_info_keys is None else {key: meta[key] for key in meta_info_keys},
        )
        return copy.deepcopy(selected) if deepcopy else selected

    def pop(
        self,
        batch_keys: Sequence[str] | None = None,
        non_tensor_batch_keys: Sequence[str] | None = None,
        meta_info_keys: Sequence[str] | None = None,
    ) -> DataProto:
        """Remove the named parts from this object and return them. Raises KeyError as `select` does, without a change.

        Without `batch_keys` the result has no `batch`, and without objects no samples.
        """
        batch_keys, non_tensor_batch_keys = batch_keys or (), non_tensor_batch_keys or ()
        meta_info_keys = meta_info_keys or ()
        popped = self.select(batch_keys, non_tensor_batch_keys, meta_info_keys)
        if not batch_keys:
            popped.batch = None
        if self.batch is not None:
            self.batch = self.batch.exclude(*batch_keys)
        self.non_tensor_batch = without(self.non_tensor_batch, non_tensor_batch_keys)
        self.meta_info = without(self.meta_info, meta_info_keys)
        return popped

    def union(self, other: DataProto) -> DataProto:
        """Add the keys of `other`, a batch of the same samples, to this object and return it.

        A key that both have must have equal values; otherwise ValueError naming it, and nothing is changed.
        """
        holds_rows = other.batch is not None or other.non_tensor_batch
        if holds_rows and (self.batch is not None or self.non_tensor_batch) and len(other) != len(self):
            raise ValueError(f"union of {len(self)} samples with {len(other)} samples")
        tensors = merge("batch", self._tensors(), other._tensors())
        non_tensors = merge("non_tensor_batch", self.non_tensor_batch, other.non_tensor_batch)
        meta_info = merge("meta_info", self.meta_info, other.meta_info)
        if other.batch is not None:
            self.batch = TensorDict(tensors, batch_size=other.batch.batch_size)
        self.non_tensor_batch, self.meta_info = non_tensors, meta_info
        return self

    def reorder(self, indices: Sequence[int] | np.ndarray | torch.Tensor) -> DataProto:
        """Put the sample `indices[i]` at place i, in this object, and return it. `indices` is a permutation."""
        order = positions(indices, len(self))
        if not np.array_equal(np.sort(order), np.arange(len(self))):
            raise ValueError(f"reorder needs a permutation of {len(self)} samples, not {order.tolist()[:16]}...")
        ordered = self[order]
        self.batch, self.non_tensor_batch = ordered.batch, ordered.non_tensor_batch
        return self

    def rename(self, old_keys: str | Sequence[str] = (), new_keys: str | Sequence[str] = ()) -> DataProto:
        """Rename tensors in this object, and return it. Errors leave it unchanged."""
        old = [old_keys] if isinstance(old_keys, str) else list(old_keys)
        new = [new_keys] if isinstance(new_keys, str) else list(new_keys)
        self._require(old, (), ())
        names = dict(zip(old, new, strict=False))
        renamed = [names.get(key, key) for key in self._tensors()]
        if not len(old) == len(new) == len(names) or len(set(renamed)) != len(renamed):
            raise ValueError(f"rename {old} to {new}: one name of its own for each tensor")
        if self.batch is not None:
            values = dict(zip(renamed, self._tensors().values(), strict=True))
            self.batch = TensorDict(values, batch_size=self.batch.batch_size)
        return self

    def repeat(self, repeat_times: int = 2, interleave: bool = True) -> DataProto:
        """Every sample `repeat_times` times: a a b b when interleaved, else a b a b."""
        rows = np.arange(len(self))
        return self[np.repeat(rows, repeat_times) if interleave else np.tile(rows, repeat_times)]

    def sample_level_repeat(self, repeat_times: Sequence[int] | np.ndarray | torch.Tensor) -> DataProto:
        """The i-th sample `repeat_times[i]` times, one after the other."""
        times = [int(count) for count in repeat_times]
        if len(times) != len(self) or min(times, default=0) < 0:
            raise ValueError(f"sample_level_repeat needs one count for each of {len(self)} samples, not {times[:16]}")
        return self[np.repeat(np.arange(len(self)), times)]

    def unfold_column_chunks(self, n_split: int, split_keys: Sequence[str] | None = None) -> DataProto:
        """`n_split` samples of each: of what `split_keys` name, tensors [B, n_split * m, ...] or objects of as many
        elements, each has its m; everything else is repeated. Raises ValueError for what does not divide."""
        keys, tensors, objects = split_keys or (), self._tensors(), self.non_tensor_batch
        if unknown := [key for key in keys if key not in tensors and key not in objects]:
            raise KeyError(f"there is no {unknown} to unfold; there are {sorted(self._signature())}")
        repeated = self.repeat(n_split)
        split_tensors = {key: unfolded(key, tensors[key], n_split) for key in keys if key in tensors}
        split_objects = {key: unfolded(key, objects[key], n_split) for key in keys if key in objects}
        return DataProto.from_dict(
            repeated._tensors() | split_tensors, repeated.non_tensor_batch | split_objects, repeated.meta_info
        )

    def split(self, split_size: int) -> list[DataProto]:
        """Consecutive parts of `split_size` samples; the last may be shorter."""
        if split_size < 1:
            raise ValueError(f"split into parts of {split_size} samples")
        return [self[start : start + split_size] for start in range(0, len(self), split_size)]

    def chunk(self, chunks: int) -> list[DataProto]:
        """Consecutive parts of equal length. Raises ValueError when the length does not divide.

        With auto padding the parts have the next larger length, and the last ones the rest.
        """
        if chunks < 1 or (len(self) % chunks and not self.is_padding_enabled()):
            raise ValueError(f"{len(self)} samples cannot be split into {chunks} equal chunks")
        size = -(-len(self) // chunks)
        return [self[start * size : (start + 1) * size] for start in range(chunks)]

    def make_iterator(
        self,
        mini_batch_size: int,
        epochs: int,
        seed: int | None = None,
        dataloader_kwargs: Mapping[str, Any] | None = None,
    ) -> Iterator[DataProto]:
        """Mini-batches of all samples, `epochs` times. `dataloader_kwargs` are torch's `DataLoader`'s (`shuffle`).

        Raises ValueError unless the length is a multiple of `mini_batch_size`.
        """
        if mini_batch_size < 1 or len(self) % mini_batch_size:
            raise ValueError(f"{len(self)} samples cannot be split into mini-batches of {mini_batch_size}")
        generator = None if seed is None else torch.Generator().manual_seed(seed)
        rows: Any = range(len(self))
        loader = DataLoader(
            rows, batch_size=mini_batch_size, collate_fn=list, generator=generator, **(dataloader_kwargs or {})
        )
        return (self.select_idxs(chosen) for _ in range(epochs) for chosen in loader)

    def is_padding_enabled(self) -> bool:
        """Whether the batch may be padded to divide over the ranks of a call."""
        return bool(self.meta_info.get(AUTO_PADDING, False))

    def padding(self, padding_size: int, padding_candidate: str = "first") -> DataProto:
        """Append `padding_size` copies of the `first` or the `last` sample, in this object, and return it."""
        if padding_candidate not in ("first", "last"):
            raise ValueError(f"padding_candidate is first or last, not {padding_candidate!r}")
        if padding_size and not len(self):
            raise ValueError("an empty batch has no sample to pad with")
        row = 0 if padding_candidate == "first" else len(self) - 1
        padded = self[[*range(len(self)), *[row] * padding_size]]
        self.batch, self.non_tensor_batch = padded.batch, padded.non_tensor_batch
        return self

    @staticmethod
    def concat(data: Sequence[DataProto]) -> DataProto:
        """The samples of all parts in order. All must have the same keys.

        `meta_info['metrics']`, a dict per part, becomes one dict of lists with the values of all parts; any other
        entry of `meta_info` must be equal in the parts that have it. Raises ValueError naming what differs.
        """
        parts = data
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
            meta_info = merge("meta_info", meta_info, without(part.meta_info, ["metrics"]))
        if any("metrics" in part.meta_info for part in parts):
            meta_info["metrics"] = collect_metrics([part.meta_info.get("metrics", {}) for part in parts])
        return DataProto(batch, non_tensors, meta_info)

    def to(self, device: torch.device | str) -> DataProto:
        """Move all tensors of this object to `device`, and return it."""
        if self.batch is not None:
            self.batch = self.batch.to(device)
        return self

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
            tensors = {key: to_bytes(value) for key, value in self._tensors().items()}
        return {
            "size": len(self),
            "tensors": tensors,
            "non_tensor_batch": self.non_tensor_batch,
            "meta_info": self.meta_info,
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.batch = None
        if state["tensors"] is not None:
            tensors = {key: from_bytes(*value) for key, value in state["tensors"].items()}
            self.batch = TensorDict(tensors, batch_size=[state["size"]])
        self.non_tensor_batch, self.meta_info = state["non_tensor_batch"], state["meta_info"]


def tensors_of(data: DataProto) -> TensorDict:
    """`data.batch`. Raises ValueError if it is None."""
    if data.batch is None:
        raise ValueError("the batch holds no tensors")
    return data.batch


def pad_dataproto_to_divisor(data: DataProto, size_divisor: int) -> tuple[DataProto, int]:
    """Repeat samples from the start until the length is a multiple of `size_divisor`; also returns the number added."""
    if not len(data):
        raise ValueError(f"an empty batch cannot be padded to a multiple of {size_divisor}")
    pad_size = -len(data) % size_divisor
    return (data[np.arange(len(data) + pad_size) % len(data)] if pad_size else data), pad_size


def unpad_dataproto(data: DataProto, pad_size: int) -> DataProto:
    """Drop the last `pad_size` samples: the inverse of `pad_dataproto_to_divisor`."""
    return data[: len(data) - pad_size] if pad_size else data


def _marked(meta_info: Mapping[str, Any] | None, auto_padding: bool) -> dict[str, Any]:
    return {**(meta_info or {}), **({AUTO_PADDING: True} if auto_padding else {})}
