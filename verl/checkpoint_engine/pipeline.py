"""The loops that move bytes. There is one of each; backends bring memory and wires, never loops of their own."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from verl.checkpoint_engine.digest import UInt64s, digest_piece
from verl.checkpoint_engine.plan import SyncPlan
from verl.checkpoint_engine.ports import WeightSource
from verl.checkpoint_engine.types import Shard

if TYPE_CHECKING:
    import torch

    from verl.checkpoint_engine.arena import SlotView


@dataclass(frozen=True)
class Publication:
    """What one trainer rank did: the digests of its pieces in plan order, the bytes it wrote, how long it was busy."""

    digests: UInt64s
    nbytes: int
    seconds: float


def publish(source: WeightSource, plan: SyncPlan, owner: int, slots: Sequence[SlotView]) -> Publication:
    """Write the pieces of `owner` into each of `slots`, digesting each piece while it is still in the cache.

    The source casts once, into the first slot; the others get copies of that. Called on the owner's rank.
    """
    start_s = time.perf_counter()
    pieces = plan.pieces_of(owner)
    digests = np.zeros(len(pieces), np.uint64)
    if slots:
        region = slots[0].bytes.numpy()
        views, *other_views = [_TensorViews(slot) for slot in slots]
        for row, (shard, extent) in enumerate(zip(plan.shards_of(owner), plan.extents.of(pieces), strict=True)):
            destination = views.part(shard)
            source.copy(shard, destination)
            digests[row] = digest_piece(region, *extent)
            for view in other_views:
                view.part(shard).copy_(destination)
    nbytes = plan.nbytes_of(owner) * len(slots)
    return Publication(digests, nbytes, time.perf_counter() - start_s)


class _TensorViews:
    """Parts of a slot's tensors; remembers the last tensor, because the pieces of one tensor follow each other."""

    def __init__(self, slot: SlotView) -> None:
        self._specs = {spec.name: spec for spec in slot.layout.specs}
        self._slot = slot
        self._name: str | None = None
        self._tensor: torch.Tensor | None = None

    def part(self, shard: Shard) -> torch.Tensor:
        if self._tensor is None or shard.name != self._name:
            self._tensor = self._slot.tensor(self._specs[shard.name])
            self._name = shard.name
        return self._tensor[tuple(map(slice, shard.box.start, shard.box.stop))]
