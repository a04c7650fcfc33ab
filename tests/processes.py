"""Whether processes are still there, also while they end."""

from __future__ import annotations

import time
from collections.abc import Sequence

import psutil


def is_alive(process: psutil.Process) -> bool:
    """A zombie is not."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:  # it has ended meanwhile
        return False


def wait_until_gone(processes: Sequence[psutil.Process], timeout_s: float = 60.0) -> list[psutil.Process]:
    """Those that are still there after `timeout_s`."""
    deadline = time.monotonic() + timeout_s
    while True:
        left = [process for process in processes if is_alive(process)]
        if not left or time.monotonic() > deadline:
            return left
        time.sleep(0.05)
