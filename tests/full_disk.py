"""What writing meets when a disk, or shared memory, is full."""

from __future__ import annotations

import resource
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def no_file_larger_than(nbytes: int) -> Iterator[None]:
    """No file may grow beyond `nbytes`: the nearest thing to a full disk that needs no privileges, on any machine."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
