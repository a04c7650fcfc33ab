"""Reports a full disk as `DiskFull`, whichever library was writing."""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from verl.utils.failures import NamedFailure

FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
"""Errors: no space on the disk, quota exceeded, file too large."""
_SAID = re.compile(
    rf"[(\[](os error|Errno) ({'|'.join(map(str, FULL))})[)\]]"  # libraries in Rust, safetensors among them; Python
    r"|inline_container\.cc.*(unexpected pos|failed writing|write failed)"  # torch.save keeps no errno
)


class DiskFull(NamedFailure):
    """A file does not fit on the disk. The message names the path, the needed and the free bytes."""


def require_space(path: Path, needed_nbytes: int) -> None:
    """Raises DiskFull unless the disk of `path` has so many bytes free. `path` need not exist."""
    free = _free_nbytes(path)
    if needed_nbytes > free:
        raise DiskFull(_sentence(path, needed_nbytes, free))


@contextmanager
def full_disk_told(path: Path, needed_nbytes: int | None = None) -> Iterator[None]:
    """Context for writing `needed_nbytes` in total to `path`: raises DiskFull in place of errors due to a full disk."""
    try:
        yield
    except Exception as exc:
        if not is_of_full_disk(exc):
            raise
        raise DiskFull(_sentence(path, needed_nbytes, _free_nbytes(path))) from exc


def is_of_full_disk(exc: BaseException) -> bool:
    """Whether an exception of any library reports a full disk."""
    if isinstance(exc, OSError) and exc.errno in FULL:
        return True
    return _SAID.search(str(exc)) is not None


def _sentence(path: Path, needed_nbytes: int | None, free_nbytes: int) -> str:
    needed = "more bytes than there are" if needed_nbytes is None else f"{needed_nbytes} bytes"
    return f"no space for {path}: {needed} are needed, {free_nbytes} bytes are free on its disk"


def _free_nbytes(path: Path) -> int:
    while not path.exists() and path != path.parent:
        path = path.parent
    stats = os.statvfs(path)
    return stats.f_bavail * stats.f_frsize
