"""Making sure that files are there, that they are files, and whose they are."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path

READERS = {"user": 0o077, "group": 0o027, "everyone": 0o022}
"""Who may read what a process writes: the permissions that its files lack (umask(2)). Nobody else ever may write."""


def keep_private(readers: str = "user") -> None:
    """Only `readers` may read the files that this process, and those that it starts, make from now on."""
    os.umask(READERS[readers])


def sync_to_disk(directory: Path) -> None:
    """The files directly in `directory`, and their names, survive a power failure when this returns."""
    for path in [*directory.iterdir(), directory]:
        if path.is_file() or path == directory:
            handle = os.open(path, os.O_RDONLY)
            try:
                os.fsync(handle)
            finally:
                os.close(handle)


def open_regular(path: Path, flags: int = os.O_RDONLY) -> int:
    """A descriptor of `path`, which somebody else may have made: not through a link, and without waiting for anybody.

    Raises OSError, also for a directory, a FIFO, a socket, a device or a link.
    """
    handle = os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    if stat.S_ISREG(os.fstat(handle).st_mode):
        return handle
    os.close(handle)
    raise OSError(errno.EINVAL, "not a regular file", str(path))


def real(path: Path) -> Path:
    """Where links lead. One to itself leads nowhere: opening it is an OSError."""
    return Path(os.path.realpath(path))


def read_regular(path: Path, most_nbytes: int | None = None) -> bytes:
    """What is in it, at most the first `most_nbytes`. Raises OSError for what is no file; links are followed."""
    with os.fdopen(open_regular(real(path)), "rb") as file:
        return file.read() if most_nbytes is None else file.read(most_nbytes)


def write_private(path: Path, data: bytes) -> None:
    """Only this user may read or write it, whatever the umask."""
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    with os.fdopen(handle, "wb") as file:
        file.write(data)
