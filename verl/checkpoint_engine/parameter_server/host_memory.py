"""Host memory that other processes or devices can reach without a copy."""

from __future__ import annotations

import mmap
import os
from pathlib import Path

import numpy as np
import psutil
import torch

from verl.checkpoint_engine.errors import ConfigError


def free_host_nbytes() -> int:
    """Memory that this process can still get: of the host, or of its control group if that has less."""
    free: int = psutil.virtual_memory().available
    try:
        group = Path("/sys/fs/cgroup")
        limit = (group / "memory.max").read_text().strip()
        used = int((group / "memory.current").read_text())
        cached = dict(line.split() for line in (group / "memory.stat").read_text().splitlines()).get("inactive_file", 0)
    except OSError:  # no control groups of version 2 here, or no limit to see
        return free
    return free if limit == "max" else max(min(free, int(limit) - used + int(cached)), 0)


def pinned_memory(nbytes: int) -> torch.Tensor:
    """For processes that have an accelerator."""
    return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)


def shared_memory(nbytes: int) -> tuple[torch.Tensor, int]:
    """Memory, and a file descriptor (the caller closes it) with which another process can map it, too.

    It has no name: nothing stays behind when the last process that maps it ends, however it ends. Raises ConfigError.
    """
    fd = os.memfd_create("verl-parameter-server", os.MFD_CLOEXEC)
    try:
        os.posix_fallocate(fd, 0, nbytes)  # the pages exist: running out is an error here, not a SIGBUS later
        memory = mmap.mmap(fd, nbytes, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE)
    except OSError as exc:
        os.close(fd)
        raise ConfigError(f"cannot reserve {nbytes} bytes of host memory: {exc.strerror}") from exc
    return torch.from_numpy(np.frombuffer(memory, np.uint8)), fd
