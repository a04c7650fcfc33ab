"""Shared memory does not go away with the process that made it. Two things see to it that it does.

`Janitor` is a small process that outlives its owner by one directory removal: it holds the read end of a pipe whose
only writer is the owner, so a SIGKILL of the owner reads as end-of-file. `sweep` removes what is left if both were
killed: directories whose lock nobody holds.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

_SCRIPT = """
import os, shutil, signal, sys
for name in ("SIGINT", "SIGTERM", "SIGHUP"):
    signal.signal(getattr(signal, name), signal.SIG_IGN)
os.read(0, 1)
shutil.rmtree(sys.argv[1], ignore_errors=True)
"""

YOUNG_S = 10.0
"""A directory younger than this may not have been locked by its creator yet."""


class Janitor:
    """Removes `directory` when this process ends, however it ends."""

    def __init__(self, directory: Path) -> None:
        read_end, self._write_end = os.pipe()
        with open(os.devnull, "w") as devnull:
            self._process = subprocess.Popen(
                [sys.executable, "-S", "-E", "-c", _SCRIPT, str(directory)],
                stdin=read_end,
                stdout=devnull,
                stderr=devnull,
                start_new_session=True,  # a signal to the owner's process group must not reach it
                close_fds=True,
            )
        os.close(read_end)

    def close(self) -> None:
        """Have the directory removed now and wait for the process to end. Idempotent."""
        if self._write_end >= 0:
            os.close(self._write_end)
            self._write_end = -1
            self._process.wait(timeout=30)


def sweep(shm_dir: Path, prefix: str) -> list[Path]:
    """Remove directories of jobs whose processes are all gone, and return them."""
    removed = []
    for directory in shm_dir.glob(f"{prefix}*"):
        with contextlib.suppress(FileNotFoundError, PermissionError):
            if _is_abandoned(directory):
                shutil.rmtree(directory)
                removed.append(directory)
    return removed


def _is_abandoned(directory: Path) -> bool:
    if time.time() - directory.stat().st_mtime < YOUNG_S or not (directory / "lock").exists():
        return False
    with (directory / "lock").open("r+b") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
    return True
