"""One rank's part of a checkpoint in host memory: many tensors packed into few large buffers."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

from ..errors import ConfigError
from ..memory.host_memory import (
    SharedMemory,
    free_host_nbytes,
    pinned_memory,
    shared_memory,
)
from ..plan.layout import align
from ..plan.types import ITEMSIZE
from ..support.console import is_live
from ..support.device import resolve_device
from ..support.memory import in_words
from .records import PackedTensor
from .safetensors_files import CheckpointTensor, StoredTensor, read_checkpoint

BUFFER_NBYTES = 4 * 2**30
CHUNK_NBYTES = 64 * 2**20
"""Bytes that one thread reads at a time."""
MAX_THREADS = 16

Job = Callable[[], int]
"""Fills a part of a buffer and returns how many bytes."""


@dataclass(frozen=True, kw_only=True)
class HostBuffer:
    """Packed tensors in memory that devices and peers can read. It lives as long as `memory` or a view of it."""

    memory: torch.Tensor
    """uint8, one dimension: pinned on hosts with an accelerator, else shared memory without a name."""
    tensors: tuple[PackedTensor, ...]
    shared: SharedMemory | None = None
    """The shared memory of `memory`, if it is shared."""

    def tensor(self, packed: PackedTensor) -> torch.Tensor:
        """A view of one of `tensors`."""
        part = self.memory[packed.offset : packed.offset + packed.nbytes]
        return part.view(getattr(torch, packed.dtype)).view(packed.shape)


def load_buffers(
    *,
    files: Sequence[Path] = (),
    named_tensors: Mapping[str, torch.Tensor] | None = None,
    rank: int,
    world_size: int,
    reuse: Sequence[HostBuffer] = (),
    buffer_nbytes: int = BUFFER_NBYTES,
) -> list[HostBuffer]:
    """Load safetensors `files` and copies of `named_tensors` into host memory. Not collective.

    `files` are this rank's part: the caller has divided the checkpoint (`split_files`). A buffer of `reuse` with the
    layout of a new one is overwritten; no peer may read it meanwhile. A buffer has at most `buffer_nbytes`; a larger
    tensor has its own.

    Raises ConfigError, before anything is allocated, for damaged or incomplete files (see `read_checkpoint`), a name in
    both sources, an unknown dtype, or too little memory (with the needed and free bytes).
    """
    stored = {tensor.name: tensor for tensor in read_checkpoint(files)}
    given = dict(named_tensors or {})
    _check_named(given, stored)
    specs = [(tensor.name, tensor.shape, tensor.dtype) for tensor in stored.values()]
    specs += [(name, tuple(tensor.shape), _dtype_name(tensor)) for name, tensor in given.items()]
    layouts = _pack(specs, buffer_nbytes)
    buffers = _obtain(layouts, {buffer.tensors: buffer for buffer in reuse})
    jobs = [
        job
        for buffer in buffers
        for packed in buffer.tensors
        for job in _jobs(buffer.tensor(packed), stored.get(packed.name), given.get(packed.name))
    ]
    total = sum(packed.nbytes for layout in layouts for packed in layout)
    with _progress(f"loading, rank {rank} of {world_size}", total, shown=rank == 0) as advance:
        _run(jobs, advance)
    return buffers


def stored_tensors(files: Sequence[Path]) -> Iterator[tuple[str, torch.Tensor]]:
    """(name, tensor) of each tensor in safetensors `files`, read one at a time into new memory. Raises ConfigError."""
    for stored in read_checkpoint(files):
        tensor = torch.empty(stored.shape, dtype=getattr(torch, stored.dtype))
        for job in _jobs(tensor, stored, None):
            job()
        yield stored.name, tensor


def _check_named(given: Mapping[str, torch.Tensor], stored: Mapping[str, CheckpointTensor]) -> None:
    problems = [f"{name}: is also in {stored[name].parts[0].path}" for name in given if name in stored]
    problems += [f"{name}: unknown dtype {t.dtype}" for name, t in given.items() if _dtype_name(t) not in ITEMSIZE]
    if problems:
        raise ConfigError(f"the checkpoint cannot be loaded: {'; '.join(problems)}")


def _dtype_name(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _pack(specs: Sequence[tuple[str, tuple[int, ...], str]], buffer_nbytes: int) -> list[tuple[PackedTensor, ...]]:
    """Layouts of buffers, tensors in the given order: what lies side by side in a file does so here."""
    layouts: list[list[PackedTensor]] = []
    end = 0
    for name, shape, dtype in specs:
        nbytes = ITEMSIZE[dtype] * int(np.prod(shape, dtype=object))
        if not layouts or end + nbytes > buffer_nbytes and end > 0:
            layouts.append([])
            end = 0
        layouts[-1].append(PackedTensor(name=name, shape=shape, dtype=dtype, offset=end, nbytes=nbytes))
        end += align(nbytes)
    return [tuple(layout) for layout in layouts]


def _obtain(
    layouts: Sequence[tuple[PackedTensor, ...]], reuse: Mapping[tuple[PackedTensor, ...], HostBuffer]
) -> list[HostBuffer]:
    needed = sum(_nbytes(layout) for layout in layouts if layout not in reuse)
    free = free_host_nbytes()
    if needed > free:
        raise ConfigError(
            f"the checkpoint needs {needed} bytes ({in_words(needed)}) of host memory on this rank; {free} bytes "
            f"({in_words(free)}) are free. Use more hosts, or unregister an unused checkpoint"
        )
    pinned = resolve_device() != "cpu"
    return [reuse.get(layout) or _allocate(layout, pinned=pinned) for layout in layouts]


def _nbytes(layout: Sequence[PackedTensor]) -> int:
    return max(align(layout[-1].offset + layout[-1].nbytes), 1)


def _allocate(layout: tuple[PackedTensor, ...], *, pinned: bool) -> HostBuffer:
    nbytes = _nbytes(layout)
    if pinned:
        return HostBuffer(memory=pinned_memory(nbytes), tensors=layout)
    shared = shared_memory(nbytes)
    return HostBuffer(memory=shared.memory, tensors=layout, shared=shared)


def _jobs(destination: torch.Tensor, stored: CheckpointTensor | None, given: torch.Tensor | None) -> Iterator[Job]:
    if given is not None:
        yield lambda: _copy(destination, given)
    elif stored is not None:
        start = 0
        for part in stored.parts:
            if len(stored.parts) == 1 or stored.dim == 0:  # contiguous in the file and here
                extent = part.shape[0] if part.shape else 1
                target = destination.narrow(0, start, extent) if len(stored.parts) > 1 else destination
                yield from _reads(part, target.reshape(-1).view(torch.uint8))
            else:
                extent = part.shape[stored.dim]
                yield _slice_read(part, destination.narrow(stored.dim, start, extent))
            start += extent


def _copy(destination: torch.Tensor, source: torch.Tensor) -> int:
    destination.copy_(source.detach())
    return destination.nbytes


def _reads(part: StoredTensor, memory: torch.Tensor) -> Iterator[Job]:
    for start in range(0, part.nbytes, CHUNK_NBYTES):
        chunk = memory[start : start + CHUNK_NBYTES]
        yield lambda chunk=chunk, start=start: _read(part, start, chunk)  # type: ignore[misc]


def _slice_read(part: StoredTensor, target: torch.Tensor) -> Job:
    """Read a slice that is not contiguous in the whole tensor, by way of memory of its own."""

    def job() -> int:
        whole = torch.empty(part.shape, dtype=target.dtype)
        _read(part, 0, whole.reshape(-1).view(torch.uint8))
        return _copy(target, whole)

    return job


def _read(part: StoredTensor, start: int, memory: torch.Tensor) -> int:
    """Fill `memory` with the bytes of `part` from byte `start` of it."""
    view = memory.numpy().data
    done = 0
    try:
        with part.path.open("rb", buffering=0) as file:
            file.seek(part.offset + start)
            while done < len(view):
                count = file.readinto(view[done:])
                if not count:
                    break
                done += count
    except OSError as exc:
        raise ConfigError(f"{part.path}: {exc.strerror} while reading {part.name}") from exc
    if done < len(view):
        expected, there = part.offset + part.nbytes, part.offset + start + done
        raise ConfigError(f"{part.path}: truncated while it was read: {expected} bytes expected, {there} there")
    return done


def _run(jobs: Sequence[Job], advance: Callable[[int], None]) -> None:
    """Do all jobs in threads, larger reads beside each other. The first failure ends it."""
    with ThreadPoolExecutor(min(MAX_THREADS, os.cpu_count() or 1), thread_name_prefix="load-checkpoint") as pool:
        futures = [pool.submit(job) for job in jobs]
        try:
            for future in as_completed(futures):
                advance(future.result())
        finally:
            pool.shutdown(wait=True, cancel_futures=True)


@contextmanager
def _progress(what: str, total_nbytes: int, *, shown: bool) -> Iterator[Callable[[int], None]]:
    """A bar on a terminal, else nothing. Yields what is to be told of every byte."""
    console = Console(stderr=True)
    if not shown or not is_live(console):
        yield lambda nbytes: None
        return
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task(what, total=total_nbytes)
        yield lambda nbytes: progress.advance(task, nbytes)
