"""Shared memory does not go away with the process that made it. Two things see to it that it does.

`Janitor` is a small process that outlives its owner by a few removals: it holds the read end of a pipe whose only
writer is the owner, so a SIGKILL of the owner reads as end-of-file. It is nobody's child and in a session of its
own: a signal to the owner's process group, and Ray when it ends a worker, would take the owner's children along.
`sweep` removes what is left if both were killed: directories whose lock nobody holds.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import select
import shutil
import subprocess
import sys
import time
from pathlib import Path

_SCRIPT = """
import os, shutil, signal, sys
if os.fork():
    os._exit(0)
for name in ("SIGINT", "SIGTERM", "SIGHUP"):
    signal.signal(getattr(signal, name), signal.SIG_IGN)
os.write(1, b"%d" % os.getpid())
for path in [sys.argv[1], *sys.stdin.read().splitlines()]:
    try:
        os.unlink(path)
    except IsADirectoryError:
        shutil.rmtree(path, ignore_errors=True)
    except OSError:
        pass
"""
CLOSE_TIMEOUT_S = 30.0

YOUNG_S = 10.0
"""A directory younger than this may not have been locked by its creator yet."""


class Janitor:
    """Removes `directory`, and what `watch` adds to it, when this process ends, however it ends."""

    def __init__(self, directory: Path) -> None:
        its_stdin, self._write_end = os.pipe()
        self._read_end, its_stdout = os.pipe()
        subprocess.run(
            [sys.executable, "-S", "-E", "-c", _SCRIPT, str(directory)],
            stdin=its_stdin,
            stdout=its_stdout,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
            check=True,
        )
        os.close(its_stdin)
        os.close(its_stdout)
        self.pid = int(os.read(self._read_end, 32))

    def watch(self, path: Path) -> None:
        """Remove `path`, a file or a directory, too."""
        os.write(self._write_end, f"{path}\n".encode())

    def close(self) -> None:
        """Have everything removed now and wait for the process to end. Idempotent."""
        if self._write_end >= 0:
            os.close(self._write_end)
            self._write_end = -1
            select.select([self._read_end], [], [], CLOSE_TIMEOUT_S)  # end-of-file once the process is gone
            os.close(self._read_end)


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
