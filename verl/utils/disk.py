"""Disks that are full: told as that, whichever library was writing."""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from verl.utils.failures import NamedFailure

FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
"""No space on the disk, in the user's share of it, or for a file of that size."""
_SAID = re.compile(
    rf"[(\[](os error|Errno) ({'|'.join(map(str, FULL))})[)\]]"  # libraries in Rust, safetensors among them; Python
    r"|inline_container\.cc.*(unexpected pos|failed writing|write failed)"  # torch.save keeps no errno
)


class DiskFull(NamedFailure):
    """What was to be written does not fit. The message names the path, the bytes needed and those that are free."""


def require_space(path: Path, needed_nbytes: int) -> None:
    """Raises DiskFull unless the disk of `path` has room for so much. `path` need not be there yet."""
    free = _free_nbytes(path)
    if needed_nbytes > free:
        raise DiskFull(_sentence(path, needed_nbytes, free))


@contextmanager
def full_disk_told(path: Path, needed_nbytes: int | None = None) -> Iterator[None]:
    """Around whoever writes `needed_nbytes` in all to `path`: what a full disk made of that is raised as DiskFull."""
    try:
        yield
    except Exception as exc:
        if not is_of_full_disk(exc):
            raise
        raise DiskFull(_sentence(path, needed_nbytes, _free_nbytes(path))) from exc


def is_of_full_disk(exc: BaseException) -> bool:
    """Whether a library says with this that a disk took no more."""
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
