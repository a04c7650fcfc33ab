"""The number of threads that work on large memory."""

from __future__ import annotations

import os

FEW_THREADS = 4
"""The limit on a small host, where transport and engines need cores, too."""
SHARE_OF_CORES = 8
"""On a large host a member uses one core in this many: a host's eight trainer ranks work at the same time."""


def memory_threads() -> int:
    """The number of threads with which a member of this host digests or copies large memory."""
    cores = len(os.sched_getaffinity(os.getpid()))  # of the process: a thread may be bound to a NUMA node
    return max(min(FEW_THREADS, cores), cores // SHARE_OF_CORES)
