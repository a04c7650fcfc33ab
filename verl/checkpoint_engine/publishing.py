"""The loop that copies weights out of a trainer. Backends bring the memory that it copies into."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import numpy as np

from verl.checkpoint_engine.plan import SyncPlan
from verl.checkpoint_engine.ports import WeightSource
from verl.checkpoint_engine.shards import Extents
from verl.checkpoint_engine.types import Box, Shard

if TYPE_CHECKING:
    import numpy.typing as npt
    import torch

    from verl.checkpoint_engine.arena import SlotView

COPY_NBYTES = 16 * 2**20
"""At most so many bytes, or one piece, are copied out of a source at once."""
PAST_CACHE_NBYTES = 2**20
"""Copies from this size on write past the cache."""


def publisher_environment() -> dict[str, str]:
    """What a process that publishes needs in its environment when it begins, beside what this one has there.

    memcpy then writes past the cache: it need not read first what it overwrites, and several ranks of a host share its
    memory's speed. glibc by itself does so from some hundred MiB on (https://sourceware.org/glibc/manual, tunables).
    """
    name, given = "glibc.cpu.x86_non_temporal_threshold", os.environ.get("GLIBC_TUNABLES", "")
    if name in given:
        return {}
    return {"GLIBC_TUNABLES": f"{given}:{name}={PAST_CACHE_NBYTES}".removeprefix(":")}


class PieceMemory(Protocol):
    """Memory that has a place for every piece of one owner."""

    @property
    def bytes(self) -> torch.Tensor:
        """All of it, uint8."""

    def places(self, held: Sequence[Shard]) -> Sequence[tuple[Shard, torch.Tensor]]:
        """What publishing copies and where to, neighbouring pieces as one; tensors may be strided; borrowed.

        `held` is what the source says that it holds: each copy lies inside one of those shards.
        """

    @property
    def extents(self) -> Extents:
        """Where each piece lies in `bytes`, in the order of `SyncPlan.pieces_of`."""


@dataclass(frozen=True)
class Publication:
    """What one trainer rank did: where its pieces are now, the bytes that it wrote, how long its trainer waited.

    `memory` is borrowed from the backend until its next `send_weights` or `finalize`.
    """

    memory: PieceMemory
    nbytes: int
    seconds: float


def publish(source: WeightSource, memory: PieceMemory) -> Publication:
    """Copy every piece of an owner out of `source`, which casts on the way. Called on the owner's rank.

    The trainer waits for this. What can be done with the copy comes later: digests, other slots, wires.
    """
    start_s = time.perf_counter()
    for shard, place in memory.places(source.shards()):
        source.copy(shard, place)
    seconds = time.perf_counter() - start_s
    return Publication(memory, int(memory.extents.nbytes.sum()), seconds)


def copy_values(destination: torch.Tensor, values: torch.Tensor) -> None:
    """What a source's `copy` does with values that lie in memory: any dtype, device and strides.

    Where nothing is to be converted it is a plain memcpy, which can write past the cache (`publisher_environment`);
    torch's own copies never do.
    """
    plain = (
        values.dtype == destination.dtype
        and values.device.type == destination.device.type == "cpu"
        and values.is_contiguous()
        and destination.is_contiguous()
    )
    if plain and values.nbytes:
        np.copyto(_bytes(destination), _bytes(values))
    else:
        destination.copy_(values)


def _bytes(tensor: torch.Tensor) -> npt.NDArray[np.uint8]:
    import torch

    array: npt.NDArray[np.uint8] = tensor.detach().reshape(-1).view(torch.uint8).numpy()
    return array


def joined_pieces(plan: SyncPlan, owner: int, extents: Extents, held: Sequence[Shard]) -> Iterator[tuple[int, Shard]]:
    """What lies back to back at `extents` and makes one box inside one of `held`, as one: (offset, shard), in order.

    A copy costs a few microseconds of Python, however long it is. There is a limit all the same, for sources that need
    memory for what they copy. Pure.
    """
    boxes: dict[str, list[Box]] = {}
    for shard in held:
        boxes.setdefault(shard.name, []).append(shard.box)
    pending: tuple[int, int, Shard] | None = None
    places = extents.of(range(len(extents)))
    for (offset, run_nbytes, rows, _), shard in zip(places, plan.shards_of(owner), strict=True):
        if pending is not None:
            start, end, before = pending
            if rows == 1 and offset == end and end + run_nbytes - start <= COPY_NBYTES and _continues(before, shard):
                box = Box(before.box.start, (shard.box.stop[0], *before.box.stop[1:]))
                if any(whole.contains(box) for whole in boxes[shard.name]):
                    pending = start, end + run_nbytes, Shard(shard.name, box)
                    continue
            yield start, before
        pending = offset, offset + run_nbytes if rows == 1 else -1, shard
    if pending is not None:
        yield pending[0], pending[2]


def _continues(before: Shard, shard: Shard) -> bool:
    """Whether the rows of `shard` are the next ones."""
    first, then = before.box, shard.box
    return (
        shard.name == before.name
        and first.stop[:1] == then.start[:1] != ()
        and (first.start[1:], first.stop[1:]) == (then.start[1:], then.stop[1:])
    )


class SlotPieces:
    """The places of one owner's pieces in a node's slot: a `PieceMemory` for owners on the node's host."""

    def __init__(self, slot: SlotView, plan: SyncPlan, owner: int) -> None:
        self.bytes = slot.bytes
        self.extents = plan.extents_of(owner)
        self._slot, self._plan, self._owner = slot, plan, owner
        self._places: list[tuple[Shard, torch.Tensor]] | None = None

    def places(self, held: Sequence[Shard]) -> Sequence[tuple[Shard, torch.Tensor]]:
        if self._places is None:
            specs = {spec.name: spec for spec in self._slot.layout.specs}
            self._places = [
                (shard, self._slot.tensor(specs[shard.name])[tuple(map(slice, shard.box.start, shard.box.stop))])
                for _, shard in joined_pieces(self._plan, self._owner, self.extents, held)
            ]
        return self._places
