"""Create, read and sync files safely: durable, private, and never through a link or a FIFO of another user."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path

READERS = {"user": 0o077, "group": 0o027, "everyone": 0o022}
"""The umask (umask(2)) for each class of readers of a process's files. Only the user may write."""


def keep_private(readers: str = "user") -> None:
    """Let only `readers` read the files that this process, and processes that it starts, create from now on."""
    os.umask(READERS[readers])


def sync_to_disk(directory: Path) -> None:
    """Sync the files directly in `directory`, and their names, to disk, so that they survive a power failure."""
    for path in [*directory.iterdir(), directory]:
        if path.is_file() or path == directory:
            handle = os.open(path, os.O_RDONLY)
            try:
                os.fsync(handle)
            finally:
                os.close(handle)


def why_not_written(path: Path) -> str | None:
    """Why the file `path`, which a program writes at its end, could not be written, so that it is told before the
    work; None if it could. Leaves what is there as it is."""
    if path.exists() and not path.is_file() and not path.is_dir():
        return None  # a device or a pipe
    there = path.exists()
    try:
        with path.open("ab"):
            pass
        if not there:
            path.unlink(missing_ok=True)
    except OSError as exc:
        where = path.absolute().parent
        return f"there is no directory {where}" if not where.is_dir() else str(exc.strerror)
    return None


def open_regular(path: Path, flags: int = os.O_RDONLY) -> int:
    """Open `path`, which another user may have made: not through a link, and without blocking on a FIFO.

    Raises OSError, also for a directory, a FIFO, a socket, a device or a link.
    """
    handle = os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    if stat.S_ISREG(os.fstat(handle).st_mode):
        return handle
    os.close(handle)
    raise OSError(errno.EINVAL, "not a regular file", str(path))


def real(path: Path) -> Path:
    """Resolve links. A link to itself stays, and opening it is an OSError."""
    return Path(os.path.realpath(path))


def read_regular(path: Path, most_nbytes: int | None = None) -> bytes:
    """Read at most `most_nbytes` of a regular file. Follows links. Raises OSError for anything else than a file."""
    with os.fdopen(open_regular(real(path)), "rb") as file:
        return file.read() if most_nbytes is None else file.read(most_nbytes)


def write_private(path: Path, data: bytes) -> None:
    """Write a file that only this user may read or write, for any umask."""
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    with os.fdopen(handle, "wb") as file:
        file.write(data)
