"""Host memory that other processes or devices can reach without a copy."""

from __future__ import annotations

import mmap
import os
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import psutil
import torch

from ..errors import ConfigError


def free_host_nbytes() -> int:
    """Bytes that this process can still allocate: of the host, or of its control group if that has less."""
    free: int = psutil.virtual_memory().available
    try:
        group = Path("/sys/fs/cgroup")
        limit = (group / "memory.max").read_text("utf-8").strip()
        used = int((group / "memory.current").read_text("utf-8"))
        cached = dict(line.split() for line in (group / "memory.stat").read_text("utf-8").splitlines()).get(
            "inactive_file", 0
        )
    except OSError:  # no control groups of version 2 here, or no limit to see
        return free
    return free if limit == "max" else max(min(free, int(limit) - used + int(cached)), 0)


def pinned_memory(nbytes: int) -> torch.Tensor:
    """Pinned memory, uint8, for processes that have an accelerator."""
    return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)


@dataclass(frozen=True)
class SharedMemory:
    """Shared memory without a name: the kernel frees it when the last process that maps it ends, even if killed.

    It lives as long as `memory` or a view of it, the file descriptor as long as this object.
    """

    memory: torch.Tensor
    """uint8, one dimension."""
    fd: int
    """The file descriptor with which another process can map it."""

    def __post_init__(self) -> None:
        weakref.finalize(self, os.close, self.fd)


def shared_memory(nbytes: int) -> SharedMemory:
    """Allocate and pre-fault `nbytes`. Raises ConfigError if the host has less."""
    fd = os.memfd_create("verl-parameter-server", os.MFD_CLOEXEC)
    try:
        os.posix_fallocate(fd, 0, nbytes)  # the pages exist: running out is an error here, not a SIGBUS later
        memory = mmap.mmap(fd, nbytes, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE)
    except OSError as exc:
        os.close(fd)
        raise ConfigError(f"cannot reserve {nbytes} bytes of host memory: {exc.strerror}") from exc
    return SharedMemory(torch.from_numpy(np.frombuffer(memory, np.uint8)), fd)


class KeptMemory:
    """Shared memory kept from one use to the next, because allocating it takes longer than filling it.

    Used from one thread.
    """

    def __init__(self) -> None:
        self._kept: list[SharedMemory] = []

    @property
    def nbytes(self) -> int:
        """Bytes of the pieces that are kept and not taken."""
        return sum(piece.memory.nbytes for piece in self._kept)

    def take(self, nbytes: int, count: int) -> list[SharedMemory]:
        """Return `count` pieces of `nbytes` with undefined content, and free kept pieces of other sizes.

        Raises ConfigError if the host has less memory.
        """
        fitting = [piece for piece in self._kept if piece.memory.nbytes == nbytes]
        self._kept = fitting[count:]
        return fitting[:count] + [shared_memory(nbytes) for _ in range(count - len(fitting))]

    def keep(self, pieces: Sequence[SharedMemory]) -> None:
        """Offer `pieces` for reuse. Their content may be overwritten."""
        self._kept += pieces

    def release(self) -> None:
        self._kept.clear()
