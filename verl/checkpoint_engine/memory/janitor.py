"""Remove shared memory of processes that have ended: the kernel keeps the files of an arena.

`Janitor` is a small process that removes a directory after its owner has ended. `sweep` removes directories whose lock
no process holds, for owners that were killed with their janitor.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import stat
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from ..support.cleanup_process import CleanupProcess
from ..support.files import open_regular
from . import removing

YOUNG_S = 10.0
"""A directory younger than this may not have been locked by its creator yet."""


class Janitor(CleanupProcess):
    """Removes `directory` and the paths given to `watch` when this process ends, even if killed, or on `close`."""

    def __init__(self, directory: Path) -> None:
        super().__init__(Path(removing.__file__), str(directory))

    def watch(self, path: Path) -> None:
        """Also remove `path`, a file or a directory."""
        self.send(str(path))


def sweep(shm_dir: Path, prefix: str) -> list[Path]:
    """Remove this user's directories `prefix*` whose lock no process holds, and return them."""
    removed = []
    for directory in shm_dir.glob(f"{prefix}*"):
        with contextlib.suppress(OSError):  # gone by now, or not ours: whatever it is, it is no reason not to start
            if _is_abandoned(directory):
                shutil.rmtree(directory)
                removed.append(directory)
    return removed


def await_removal(directory: Path) -> None:
    """Wait until the janitor of a killed owner has removed `directory`: at most YOUNG_S, and not for a locked one."""
    deadline = time.monotonic() + YOUNG_S
    while directory.exists() and not _is_locked(directory) and time.monotonic() < deadline:
        time.sleep(0.01)


def _is_abandoned(directory: Path) -> bool:
    """Raises OSError for what nobody but a stranger has made: a link, a lock that is a directory or a FIFO."""
    found = directory.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid():
        return False
    if time.time() - found.st_mtime < YOUNG_S or not (directory / "lock").exists():
        return False
    return not _is_held(directory / "lock")


def _is_locked(directory: Path) -> bool:
    """Also if what is there in a lock's place is none."""
    try:
        return _is_held(directory / "lock")
    except FileNotFoundError:
        return False
    except OSError:
        return True


def _is_held(lock: Path) -> bool:
    """Raises OSError for what is no file of ours."""
    handle = open_regular(lock, os.O_RDWR)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(handle)
    return False


@contextlib.contextmanager
def scratch_directory() -> Iterator[Path]:
    """A directory that is removed also if this process is killed."""
    directory = Path(tempfile.mkdtemp(prefix="verl-certify-"))
    janitor = Janitor(directory)
    try:
        yield directory
    finally:
        janitor.close()
