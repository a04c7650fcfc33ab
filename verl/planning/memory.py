"""Computes from a plan the memory that hosts and devices need in each phase, and whether they have it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from verl.checkpoint_engine.memory.delta import room_nbytes
from verl.checkpoint_engine.memory.packed import Packing
from verl.checkpoint_engine.plan.layout import Layout
from verl.checkpoint_engine.plan.sync_plan import SyncPlan
from verl.planning.job import Job
from verl.planning.shapes import PlannedModel
from verl.planning.traffic import MESSAGE_NBYTES

MASTER_NBYTES = 4
"""Bytes of a weight, of its gradient, and of each of AdamW's two moments, which are float32."""
IN_FLIGHT = 4
"""The most messages whose pieces are scattered at a time."""


@dataclass(frozen=True, kw_only=True)
class Need:
    where: str
    """`trainer device`, `rollout host`, ..."""
    phase: str
    parts: tuple[tuple[str, int], ...]
    """(purpose, bytes), for the host or device that needs most."""
    available_nbytes: int | None = None

    @property
    def nbytes(self) -> int:
        return sum(nbytes for _, nbytes in self.parts)

    @property
    def fits(self) -> bool | None:
        """Whether the need fits; None if the available memory is unknown."""
        return None if self.available_nbytes is None else self.nbytes <= self.available_nbytes


def needs(
    model: PlannedModel,
    plan: SyncPlan,
    job: Job,
    *,
    device_nbytes: int | None = None,
    host_nbytes: int | None = None,
    shared_nbytes: int | None = None,
) -> list[Need]:
    """The needs of each phase, without activations, KV caches and the libraries' own memory."""
    owned = [_region(plan, owner, job) for owner in range(plan.num_owners)]
    ranks = np.array(owned).reshape(job.trainers.count, job.trainers.each, 2).sum(axis=1)
    region, deltas = (int(column) for column in ranks[ranks.sum(axis=1).argmax()])
    published = (("copies that peers read", region), ("deltas", deltas))
    slots = job.slots * plan.layout.nbytes
    node = (
        (f"{job.slots} slots", slots),
        ("deltas", plan.layout.nbytes // 2 if job.changed is not None else 0),
        ("bounce buffers", IN_FLIGHT * MESSAGE_NBYTES),
    )
    engine = engine_rank_nbytes(plan.layout, job.rollout_tp)
    on_host = (*node, *published) if job.colocated else node
    host = "host" if job.colocated else "rollout host"
    found = [
        Need(where="trainer device", phase="train", parts=_training(model, job), available_nbytes=device_nbytes),
        Need(where="trainer host", phase="publish, stage", parts=published, available_nbytes=host_nbytes),
        Need(where=host, phase="stage, verify, activate", parts=on_host, available_nbytes=host_nbytes),
        Need(where=f"{host}, shared memory", phase="always", parts=node[:1], available_nbytes=shared_nbytes),
        Need(
            where="rollout device",
            phase="first activate",
            parts=(("weights", engine), ("a second model, loaded as from disk (check_engine=first)", engine)),
            available_nbytes=device_nbytes,
        ),
        Need(where="rollout device", phase="generate", parts=(("weights", engine),), available_nbytes=device_nbytes),
    ]
    return [need for need in found if not (job.colocated and need.where == "trainer host")]


def engine_rank_nbytes(layout: Layout, tensor_parallel: int) -> int:
    """The bytes of an engine rank, about as in vLLM: ranks of a replica divide matrices, each has all vectors."""
    nbytes = layout.shapes.prod(axis=1) * layout.itemsizes
    matrices = int(nbytes[[len(spec.shape) > 1 for spec in layout.specs]].sum())
    return -(-matrices // tensor_parallel) + layout.payload_nbytes - matrices


def _region(plan: SyncPlan, owner: int, job: Job) -> tuple[int, int]:
    packing = Packing.of(plan, owner)
    deltas = room_nbytes(packing.region_nbytes, len(packing.nbytes)) if job.changed is not None else 0
    return packing.region_nbytes, deltas


def _training(model: PlannedModel, job: Job) -> tuple[tuple[str, int], ...]:
    """Of the rank that holds most. Megatron's data-parallel ranks divide the moments among them."""
    held = int(model.held_numel.max())
    moments = held
    if job.strategy == "megatron":
        # Experts have other replicas than the rest: of what ranks hold several times each keeps its share.
        moments = -(-model.parameters // job.trainers.ranks)
    return (
        ("weights", held * MASTER_NBYTES),
        ("gradients", held * MASTER_NBYTES),
        ("moments", 2 * moments * MASTER_NBYTES),
    )


def unfit(found: Sequence[Need]) -> Iterator[Need]:
    return (need for need in found if need.fits is False)
