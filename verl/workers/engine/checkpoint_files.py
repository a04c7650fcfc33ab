"""Read files of torch DCP without running code in them, and write them if the disk has room. All are collectives."""

from __future__ import annotations

import importlib
import io
import math
import pickle
import threading
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum, EnumType
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, StorageMeta, TensorStorageMetadata
from torch.distributed.checkpoint.planner import ReadItem, SavePlan, WriteItem
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from verl.compat.python import PlainUnpickler
from verl.utils.config import ConfigError
from verl.utils.disk import DiskFull, full_disk_told, is_of_full_disk, require_space
from verl.utils.file_digests import damaged, write_digests

METADATA_FILE = ".metadata"
"""Written last by torch DCP: its presence shows that the checkpoint is complete."""
LONGEST_REASON = 2_000
"""Characters of another error in ours: two paths and more."""
_DCP = "torch.distributed.checkpoint"
_DATA = {
    *((f"{_DCP}.metadata", name) for name in ("Metadata", "MetadataIndex", "StorageMeta", "BytesStorageMetadata")),
    *((f"{_DCP}.metadata", name) for name in ("TensorStorageMetadata", "ChunkStorageMetadata", "TensorProperties")),
    (f"{_DCP}.metadata", "_MEM_FORMAT_ENCODING"),
    (f"{_DCP}.filesystem", "_StorageInfo"),
    (f"{_DCP}.filesystem", "_StoragePrefix"),
    ("torch.serialization", "_get_layout"),
    ("torch", "Size"),
    ("pathlib", "PosixPath"),
    ("pathlib._local", "PosixPath"),  # Python 3.13
}
"""What DCP's metadata are made of, beside torch's dtypes: classes that hold values and do nothing."""


@dataclass(frozen=True)
class Loan:
    """A borrowed state, which the trainer changes after its return."""

    may_copy: Callable[[int], bool]
    """Whether host memory has room for this many bytes. If not, the state is returned after it is written."""
    returned: threading.Event = field(default_factory=threading.Event)


def write_state(
    directory: Path, state: dict[str, Any], *, loan: Loan | None = None, group: dist.ProcessGroup | None = None
) -> None:
    """Write and sync to disk, with digests of the files that this rank wrote. A collective of `group`, which has all
    ranks.

    With `loan` the parts of `state` are emptied when they are copied. Every rank raises DiskFull if there is no room:
    before anything is written, or where a quota ends it.
    """
    planner = _SavePlanner(directory, loan)
    writer = FileSystemWriter(directory, sync_files=True, overwrite=False)
    try:
        save(state, storage_writer=writer, planner=planner, process_group=group)
        _write_digests(directory, dist.get_rank(group))
    except CheckpointException as exc:  # no subclass of Exception, and the same on every rank
        raise _of_save(exc, directory, planner.needed_nbytes, group) from exc
    finally:
        if loan is not None:
            loan.returned.set()


def read_state(directory: Path, state: dict[str, Any]) -> None:
    """Fill `state`. Raises ConfigError for files that have changed since they were written, or contradict metadata."""
    _require_undamaged(directory)
    try:
        load(state, storage_reader=_Reader(directory), planner=_LoadPlanner())
    except CheckpointException as exc:
        first = next(failure for failure, _ in exc.failures.values())
        if isinstance(first, ConfigError):
            raise first from exc
        raise ConfigError(f"{directory} cannot be loaded: {_one_line(first)}") from exc


def read_entry(directory: Path, name: str) -> Any:
    """One value of a checkpoint, whole: a tensor, or plain values. No collective.

    Raises ConfigError if `directory` is no complete checkpoint, lacks `name`, or has damaged files.
    """
    entry = read_metadata(directory).state_dict_metadata.get(name)
    if entry is None:
        raise ConfigError(f"{directory} does not hold {name}")
    state: dict[str, Any] = {name: None}
    if isinstance(entry, TensorStorageMetadata):
        state[name] = torch.empty(entry.size, dtype=entry.properties.dtype)
    try:
        with warnings.catch_warnings(action="ignore"):  # that there is no process group
            load(state, storage_reader=_Reader(directory), planner=_LoadPlanner(), no_dist=True)
    except CheckpointException as exc:
        raise ConfigError(f"{directory} cannot be loaded: {_one_line(next(iter(exc.failures.values()))[0])}") from exc
    return state[name]


def read_metadata(directory: Path) -> Metadata:
    """Raises ConfigError if `directory` is no complete checkpoint. No collective."""
    if not (directory / METADATA_FILE).is_file():
        raise ConfigError(f"{directory} is not a training checkpoint: it has no {METADATA_FILE}")
    return _Reader(directory).read_metadata()


def _write_digests(directory: Path, rank: int) -> None:
    own = [path.name for path in directory.glob(f"__{rank}_*.distcp")]
    with full_disk_told(directory):
        write_digests(directory, [*own, *([METADATA_FILE] if rank == 0 else [])], f"digests-{rank}.json")


def _require_undamaged(directory: Path) -> None:
    """Every rank reads a part of the files."""
    world = dist.get_world_size()
    found: list[str] = [""] * world
    dist.all_gather_object(found, damaged(directory, share=(dist.get_rank(), world)))
    if told := [text for text in found if text]:
        raise ConfigError(f"the checkpoint is damaged: {told[0]}; trainer.resume_from_path names another one")


def _of_save(
    exc: CheckpointException, directory: Path, needed_nbytes: int | None, group: dist.ProcessGroup | None
) -> Exception:
    """What all ranks raise for it. Only rank 0 knows how many bytes the ranks wanted to write."""
    first = next(failure for failure, _ in exc.failures.values())
    if isinstance(first, DiskFull):
        return first
    if not any(is_of_full_disk(failure) for failure, _ in exc.failures.values()):
        return RuntimeError(f"{directory} was not written: {_one_line(first)}")
    told: list[Any] = [None]
    if dist.get_rank() == 0:
        try:
            with full_disk_told(directory, needed_nbytes):
                raise next(failure for failure, _ in exc.failures.values() if is_of_full_disk(failure))
        except DiskFull as full:
            told = [full]
    dist.broadcast_object_list(told, src=0, group=group)
    return DiskFull(*told[0].args)


class _SavePlanner(DefaultSavePlanner):
    """Looks, on rank 0, whether all of it fits, before any rank begins to write. Copies what is lent."""

    def __init__(self, directory: Path, loan: Loan | None) -> None:
        super().__init__()
        self._directory, self._loan = directory, loan
        self._lent: dict[str, Any] = {}
        self._copies: dict[MetadataIndex, torch.Tensor | io.BytesIO] = {}
        self.needed_nbytes: int | None = None

    def set_up_planner(
        self, state_dict: dict[str, Any], storage_meta: StorageMeta | None = None, is_coordinator: bool = False
    ) -> None:
        super().set_up_planner(state_dict, storage_meta, is_coordinator)
        self._lent = state_dict

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        plans, metadata = super().create_global_plan(all_plans)
        self.needed_nbytes = sum(
            math.prod(entry.size) * entry.properties.dtype.itemsize
            for entry in metadata.state_dict_metadata.values()
            if isinstance(entry, TensorStorageMetadata)
        )
        require_space(self._directory, self.needed_nbytes)
        return plans, metadata

    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        plan = super().finish_plan(new_plan)
        tensors = [item.tensor_data for item in plan.items if item.tensor_data is not None]
        nbytes = sum(math.prod(data.chunk.sizes) * data.properties.dtype.itemsize for data in tensors)
        if self._loan is not None and self._loan.may_copy(nbytes):
            self._copies = {item.index: _copied(super(_SavePlanner, self).resolve_data(item)) for item in plan.items}
            for part in (*self._lent.values(), self.state_dict):  # what was made for it may be in a device's memory
                if isinstance(part, dict):
                    part.clear()
            self._loan.returned.set()
        return plan

    def resolve_data(self, write_item: WriteItem) -> torch.Tensor | io.BytesIO:
        copied = self._copies.get(write_item.index)
        return super().resolve_data(write_item) if copied is None else copied


class _LoadPlanner(DefaultLoadPlanner):
    """Values beside tensors are numbers and texts; DCP would unpickle whatever is there."""

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        try:
            plain = torch.load(value, weights_only=True)
        except Exception as exc:
            name = read_item.dest_index.fqn
            raise ConfigError(f"{name} of the checkpoint is no plain value: {_one_line(exc)}") from exc
        safe = io.BytesIO()
        torch.save(plain, safe)  # nothing of `plain` runs code when the planner unpickles it
        safe.seek(0)
        super().load_bytes(read_item, safe)


class _Reader(FileSystemReader):
    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        file = Path(self.path) / METADATA_FILE
        try:
            metadata = _DataUnpickler(io.BytesIO(file.read_bytes())).load()
        except Exception as exc:
            raise ConfigError(f"{file} is not the metadata of a checkpoint: {_one_line(exc)}") from exc
        if not isinstance(metadata, Metadata) or not isinstance(metadata.state_dict_metadata, dict):
            raise ConfigError(f"{file} is not the metadata of a checkpoint: it holds a {type(metadata).__name__}")
        return metadata


class _DataUnpickler(PlainUnpickler):
    """Makes nothing but what `_DATA` names: other pickles could run any code."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in _DATA:
            return getattr(importlib.import_module(module), name)
        if (module, name) == ("builtins", "getattr"):
            return _member  # so Python before 3.11.4 pickles members of enumerations
        found = getattr(torch, name, None) if module == "torch" else None
        if isinstance(found, torch.dtype):
            return found
        raise pickle.UnpicklingError(f"{module}.{name} is no part of one")


def _member(enumeration: Any, name: Any) -> Enum:
    """All that a pickle may do with `getattr`."""
    if isinstance(enumeration, EnumType) and name in enumeration.__members__:
        found: Enum = enumeration.__members__[name]
        return found
    raise pickle.UnpicklingError(f"{name} of {enumeration} is no part of one")


def _copied(value: torch.Tensor | io.BytesIO) -> torch.Tensor | io.BytesIO:
    """`value` in host memory, independent of it."""
    return value.detach().to("cpu", copy=True) if isinstance(value, torch.Tensor) else value


def _one_line(exc: BaseException) -> str:
    return (str(exc).splitlines() or [type(exc).__name__])[0][:LONGEST_REASON]
