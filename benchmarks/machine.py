"""What this machine is and can do, measured when it is asked."""

from __future__ import annotations

import os
import platform
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import psutil
import torch

from verl.checkpoint_engine.errors import ConfigError

MEMCPY_NBYTES = 2**28
"""Per buffer at most: far larger than any cache."""


def describe_machine() -> dict[str, object]:
    return {
        "processor": _field("/proc/cpuinfo", "model name") or platform.processor(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(psutil.virtual_memory().total / 2**30, 1),
        "load_average_1min": os.getloadavg()[0],
        "kernel": platform.release(),
        "python": platform.python_version(),
        "torch": torch.__version__,
    }


def require_memory(needed_nbytes: float, options: str) -> None:
    """Raises ConfigError, which names `options`, if not so much can be had without swapping."""
    available_nbytes = psutil.virtual_memory().available
    if needed_nbytes > available_nbytes:
        needed, available = (f"{nbytes / 2**30:.1f} GiB" for nbytes in (needed_nbytes, available_nbytes))
        raise ConfigError(f"{options} takes {needed} of memory; {available} are available")


def private_nbytes() -> int:
    """Anonymous memory of this process: its own, without what it shares with others."""
    return int(_field("/proc/self/status", "RssAnon").split()[0]) * 1024


class Memcpy:
    """The speed limit: plain copies of `nbytes`, through warm private buffers."""

    def __init__(self, nbytes: int, threads: int) -> None:
        size = min(nbytes, MEMCPY_NBYTES)
        self._copies = -(-nbytes // size)
        self._pairs = [(np.ones(size, np.uint8), np.zeros(size, np.uint8)) for _ in range(threads)]
        self._pool = ThreadPoolExecutor(threads)

    def gbytes_per_s(self, threads: int = 1) -> float:
        """Bytes copied per second (each counted once), `threads` copying at once.

        As many bytes per thread as the model has, because a shorter moment may catch a quieter machine.
        """
        start_s = time.perf_counter()
        list(self._pool.map(self._copy, range(threads)))
        return threads * self._copies * self._pairs[0][0].nbytes / (time.perf_counter() - start_s) / 1e9

    def _copy(self, thread: int) -> None:
        source, destination = self._pairs[thread]
        for _ in range(self._copies):
            np.copyto(destination, source)

    def close(self) -> None:
        self._pool.shutdown()
        self._pairs.clear()


def _field(path: str, key: str) -> str:
    for line in Path(path).read_text().splitlines():
        name, _, value = line.partition(":")
        if name.strip() == key:
            return value.strip()
    return ""
