"""Deltas are applied as a node does it, and what comes of it is compared with what the owner has published."""

from __future__ import annotations

import time

import numpy as np

from verl.checkpoint_engine.memory.delta import Applier, Deltas
from verl.checkpoint_engine.memory.digest import PieceDigests
from verl.checkpoint_engine.memory.packed import PackedRegion
from verl.checkpoint_engine.plan.sync_plan import SyncPlan


def in_slot(plan: SyncPlan, region: PackedRegion) -> np.ndarray:
    """A slot of a node that has everything from `region`, which is of the only owner."""
    slot, packed = np.zeros(plan.layout.nbytes, np.uint8), region.bytes.numpy()
    extents = plan.extents_of(0).of(range(len(plan)))
    for (offset, nbytes, _, _), start in zip(extents, region.packing.offset.tolist(), strict=True):
        slot[offset : offset + nbytes] = packed[start : start + nbytes]
    return slot


def apply_s(plan: SyncPlan, base: np.ndarray, deltas: np.ndarray, region: PackedRegion, *, threads: int) -> float:
    """Seconds from `base`, a slot, to what `region` holds now. Raises ValueError if it is anything else."""
    new = np.empty_like(base)
    new.fill(0)  # written once, as slots are from the second version on
    applier = Applier(plan, base, new, PieceDigests.none_of(len(plan)))
    parsed = Deltas.parse(plan, 0, deltas)
    start_s = time.perf_counter()
    wrong = applier.apply([parsed], threads=threads, stopped=lambda: False)
    seconds = time.perf_counter() - start_s
    if wrong or not (new == in_slot(plan, region)).all():
        raise ValueError("what was applied is not what was published")
    return seconds
