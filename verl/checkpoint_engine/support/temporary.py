"""A temporary directory whose path leaves room for sockets. Batch systems set TMPDIR to long ones."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Sequence
from pathlib import Path

from .config import ConfigError

SHM_DIR = Path("/dev/shm")
LONGEST_SOCKET = 107
"""Bytes of a Unix socket's path (`unix(7)`)."""


def directory_for_sockets(socket: str, others: Sequence[Path] = (Path("/tmp"), SHM_DIR)) -> Path:
    """The temporary directory of this process, or the first of `others` in which there can be `socket`, a path of ASCII
    characters. Raises ConfigError if there is none."""
    own = Path(tempfile.gettempdir())
    for directory in (own, *others):
        if has_room_for(socket, directory) and os.access(directory, os.W_OK | os.X_OK):
            return directory
    raise ConfigError(
        f"TMPDIR={own} has {len(os.fsencode(own))} bytes, with which the paths of sockets are too long, or not all of "
        f"them are ASCII; and none of {', '.join(map(str, others))} can be written: set TMPDIR to a path of at most "
        f"{LONGEST_SOCKET - len(socket) - 1} ASCII characters"
    )


def has_room_for(socket: str, directory: Path) -> bool:
    path = str(directory / socket)
    return len(path) <= LONGEST_SOCKET and path.isascii()  # Ray's program reads paths as ASCII
