"""Mooncake 0.3.13: its engine reports an error whenever it starts, also when it starts well.

`E... transfer_metadata.cpp:1098] Local segment descriptor not found` is written by the TCP transport, which looks for a
segment before it adds it. Mooncake has no setting for this line alone. The level of its logging library, glog, is read
from MC_LOG_LEVEL once, and is a public variable of glog in C++.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager

from mooncake import engine

ERROR, FATAL = 2, 3
LEVEL = "_ZN3fLI17FLAGS_minloglevelE"
"""`fLI::FLAGS_minloglevel`"""


@contextmanager
def errors_unlogged() -> Iterator[None]:
    """Mooncake writes no errors of this process inside. What a user asked for with a lower MC_LOG_LEVEL is written."""
    try:
        level = ctypes.c_int.in_dll(ctypes.CDLL(engine.__file__), LEVEL)
    except (OSError, ValueError):  # another build of glog: the line stays
        yield
        return
    if level.value != ERROR:
        yield
        return
    level.value = FATAL
    try:
        yield
    finally:
        level.value = ERROR
