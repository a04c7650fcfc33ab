"""How many threads work on large memory."""

from __future__ import annotations

import os

FEW_THREADS = 4
"""On a small host, where transport and engines want cores, too."""
SHARE_OF_CORES = 8
"""On a large one a member takes one core in so many: a host's eight trainer ranks work at the same time."""


def memory_threads() -> int:
    """With how many threads a member of this host digests or copies large memory."""
    cores = len(os.sched_getaffinity(0))
    return max(min(FEW_THREADS, cores), cores // SHARE_OF_CORES)
