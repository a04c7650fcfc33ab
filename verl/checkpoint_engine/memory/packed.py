"""A trainer rank's own copy of the pieces that it owns, packed back to back, for peers to fetch.

One contiguous, pre-faulted region per rank, registered with the transport once. Pieces that lie next to each other in a
node's slot lie next to each other here, too, so that a row-sharded tensor is one range at both ends. Short runs and
strided pieces come last, side by side, so that many of them can travel as one range.
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
"""A run below this costs more as a message of its own than as a copy at the receiver (measured with gloo: broadcasts of
256 KiB reach a third of the rate of larger ones)."""


@dataclass(frozen=True)
class Packing:
    """Where the pieces of one owner lie in its region: piece `first + i` of the plan at `offset[i]`. Pure.

    Every member computes it from the plan; nobody sends it.
    """

    first: int
    extents: Extents
    """Where the pieces belong in a slot."""
    offset: Int64s
    nbytes: Int64s
    region_nbytes: int
    tail_offset: int
    """From here on: short runs and strided pieces."""

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
    """Zeros whose pages exist already, huge ones where the kernel has them: NIXL reads those 1.4 times as fast."""
    memory = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with suppress(OSError):  # a kernel without huge pages
        memory.madvise(mmap.MADV_HUGEPAGE)
    region = np.frombuffer(memory, np.uint8)
    region[:: mmap.PAGESIZE] = 0
    return region


class PackedRegion:
    """The memory behind a `Packing`, pinned where the rank has a CUDA device. Private to this process.

    It goes with the last tensor that borrows it.
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
        """Where the region begins in this process."""
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
