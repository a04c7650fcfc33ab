"""A trainer rank's own copy of the pieces that it owns, packed back to back, for peers to fetch.

One contiguous, pre-faulted region per rank, registered with the transport once. Pieces that are neighbours in a node's
slot are neighbours here, so that a row-sharded tensor is one range at both ends. Short runs and strided pieces come
last, side by side, so that many of them can travel as one range.
"""

from __future__ import annotations

import math
import mmap
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from ..plan.layout import ALIGNMENT
from ..plan.shards import Extents, Int64s
from ..plan.sync_plan import SyncPlan
from ..plan.types import Shard
from .pinning import Pinned
from .publishing import Place, joined_pieces

if TYPE_CHECKING:
    import torch

SHORT_NBYTES = 2**20
"""A shorter run costs more as its own message than as a copy at the receiver (measured with gloo: broadcasts of 256 KiB
reach a third of the rate of larger ones)."""


@dataclass(frozen=True)
class Packing:
    """The places of one owner's pieces in its region: piece `first + i` of the plan at `offset[i]`. Pure.

    Every member computes it from the plan, so it is never sent.
    """

    first: int
    extents: Extents
    """The places of the pieces in a slot."""
    offset: Int64s
    nbytes: Int64s
    region_nbytes: int
    tail_offset: int
    """The offset at which short runs and strided pieces begin."""

    @classmethod
    def of(cls, plan: SyncPlan, owner: int) -> Packing:
        pieces = plan.pieces_of(owner)
        extents = plan.extents_of(owner)
        start, nbytes = extents.offset, extents.nbytes
        if not len(pieces):
            return cls(pieces.start, extents, start, nbytes, 0, 0)
        # A run is a maximal sequence of pieces without a gap in the slot; only a new run is aligned anew.
        single = extents.rows == 1
        follows = single[1:] & single[:-1] & (start[1:] == start[:-1] + nbytes[:-1])
        first_of_run = np.flatnonzero(np.concatenate([[True], ~follows]))
        run_nbytes = np.add.reduceat(nbytes, first_of_run)
        space = -(-run_nbytes // ALIGNMENT) * ALIGNMENT
        at_tail = (run_nbytes < SHORT_NBYTES) | ~single[first_of_run]
        order = np.argsort(at_tail, kind="stable")
        run_offset = np.empty_like(space)
        run_offset[order] = np.cumsum(space[order]) - space[order]
        run = np.cumsum(np.concatenate([[0], ~follows]))
        within = np.cumsum(nbytes) - nbytes
        offset = run_offset[run] + within - within[first_of_run][run]
        return cls(pieces.start, extents, offset, nbytes, int(space.sum()), int(space[~at_tail].sum()))


def private_memory(nbytes: int) -> npt.NDArray[np.uint8]:
    """Pre-faulted zeros, in huge pages if the kernel has them: NIXL reads those 1.4 times as fast."""
    memory = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with suppress(OSError):  # a kernel without huge pages
        memory.madvise(mmap.MADV_HUGEPAGE)
    region = np.frombuffer(memory, np.uint8)
    region[:: mmap.PAGESIZE] = 0
    return region


class PackedRegion:
    """The memory of a `Packing`, private to this process, and pinned if the rank has a CUDA device.

    It is freed with the last tensor that borrows it.
    """

    def __init__(self, plan: SyncPlan, owner: int) -> None:
        import torch

        self.plan = plan
        self.packing = Packing.of(plan, owner)
        self.bytes: torch.Tensor = torch.from_numpy(private_memory(max(self.packing.region_nbytes, 1)))
        self._pinned = Pinned(self.bytes)
        one = np.ones_like(self.packing.nbytes)
        self.extents = Extents(self.packing.offset, self.packing.nbytes, rows=one, stride=0 * one)
        self._owner = owner
        self._places: list[Place] | None = None

    @property
    def nbytes(self) -> int:
        return self.packing.region_nbytes

    @property
    def address(self) -> int:
        """The address of the region in this process."""
        return self.bytes.data_ptr()

    def places(self, held: Sequence[Shard]) -> Sequence[Place]:
        if self._places is None:
            sizes = self.packing.nbytes.tolist()
            self._places = [
                Place(shard, self._place(offset, shard), pieces, sizes[pieces.start : pieces.stop])
                for offset, shard, pieces in joined_pieces(self.plan, self._owner, self.extents, held)
            ]
        return self._places

    def _place(self, offset: int, shard: Shard) -> torch.Tensor:
        import torch

        dtype = getattr(torch, self.plan.layout.specs[self.plan.layout.index[shard.name]].dtype)
        nbytes = math.prod(shard.box.shape) * dtype.itemsize
        return self.bytes[offset : offset + nbytes].view(dtype).view(shard.box.shape)
