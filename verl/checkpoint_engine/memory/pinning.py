"""Pin host memory, so that a CUDA device copies to and from it at the rate of its link.

Copies of other memory pass through a small buffer of the driver, which a core fills, at a fraction of that rate.
`cudaHostRegister` pins existing memory (CUDA Runtime API, "Memory Management"). It takes tenths of a second per GiB, so
memory that is used repeatedly is pinned once.
"""

from __future__ import annotations

import logging
import mmap
import weakref
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    import torch

logger = logging.getLogger(__name__)
PORTABLE, READ_ONLY = 1, 8
"""`cudaHostRegisterPortable`: pinned for all devices of the process. `cudaHostRegisterReadOnly`: mapped without write
access."""

Spans = npt.NDArray[np.int64]
"""Parts of a memory: [parts, 2], offset and bytes."""


class Pinned:
    """Pages of this process, pinned until `close` or until this object is freed.

    It does nothing in a process without CUDA. If the driver refuses, one warning says that copies are slower.
    """

    def __init__(self, memory: torch.Tensor, spans: Spans | None = None, *, read_only: bool = False) -> None:
        """`spans`: the parts to pin; by default all of `memory`."""
        from ..support.device import has_cuda_context

        self._pinned: list[int] = []
        self.close = weakref.finalize(self, _unpin, self._pinned, memory)
        """Idempotent. Until then `memory` stays mapped."""
        self.close.atexit = False  # the driver may be gone by then, and the pages go with the process
        if not has_cuda_context():
            return
        flags = PORTABLE | (READ_ONLY if read_only else 0)
        cudart = _cudart()
        base = memory.data_ptr()
        for start, end in pages_of(base, np.array([[0, memory.nbytes]]) if spans is None else spans):
            error = cudart.cudaHostRegister(start, end - start, flags)
            if int(error) != 0:
                logger.warning(
                    "%d bytes of host memory cannot be pinned (%s), so copies between device and host are slower. "
                    "Only files in shared memory (tmpfs) can be; `ulimit -l` or the container may limit it",
                    end - start,
                    cudart.cudaGetErrorString(error),
                )
                self.close()
                _forget_error()
                return
            self._pinned.append(start)

    def __bool__(self) -> bool:
        return bool(self._pinned)


def _unpin(starts: list[int], _: torch.Tensor) -> None:
    while starts:
        _cudart().cudaHostUnregister(starts.pop())


def _forget_error() -> None:
    """The runtime keeps the last error until somebody asks: torch, after the next kernel, which would be blamed."""
    import torch

    with suppress(RuntimeError):
        torch.zeros(1, device="cuda")


def _cudart() -> Any:
    import torch

    cuda: Any = torch.cuda
    return cuda.cudart()


def pages_of(base: int, spans: Spans) -> list[tuple[int, int]]:
    """The pages of `spans` in the memory at `base`, as (start, end) of runs, none of which touch. Pure."""
    given = spans[spans[:, 1] > 0]
    if not len(given):
        return []
    start = (base + given[:, 0]) // mmap.PAGESIZE * mmap.PAGESIZE
    end = -(-(base + given.sum(axis=1)) // mmap.PAGESIZE) * mmap.PAGESIZE
    order = np.argsort(start, kind="stable")
    start, end = start[order], np.maximum.accumulate(end[order])
    first = np.concatenate([[True], start[1:] > end[:-1]])
    last: npt.NDArray[np.bool_] = np.concatenate([first[1:], [True]])
    return list(zip(start[first].tolist(), end[last].tolist(), strict=True))
