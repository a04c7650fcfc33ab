"""What this machine is and can do, measured when it is asked."""

from __future__ import annotations

import os
import platform
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import torch

MEMCPY_NBYTES = 2**28
"""Per buffer at most: far larger than any cache."""


def describe_machine() -> dict[str, object]:
    return {
        "processor": _field("/proc/cpuinfo", "model name") or platform.processor(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(_kib("MemTotal") / 2**20, 1),
        "load_average_1min": os.getloadavg()[0],
        "kernel": platform.release(),
        "python": platform.python_version(),
        "torch": torch.__version__,
    }


def available_nbytes() -> int:
    """Memory that can be had without swapping."""
    return _kib("MemAvailable") * 1024


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


def _kib(key: str) -> int:
    return int(_field("/proc/meminfo", key).split()[0])


def _field(path: str, key: str) -> str:
    for line in Path(path).read_text().splitlines():
        name, _, value = line.partition(":")
        if name.strip() == key:
            return value.strip()
    return ""
