"""The Ray actor that owns the memory in which the trainer ranks of its host leave their state."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np

from verl.checkpoint_engine.errors import ConfigError, IntegrityError
from verl.checkpoint_engine.memory.arena import NodeArena, require_free_bytes
from verl.checkpoint_engine.memory.digest import Manifest
from verl.checkpoint_engine.memory.host_memory import free_host_nbytes
from verl.checkpoint_engine.plan.sync_plan import SyncPlan
from verl.utils.lifetime import begin_actor

SLOTS = 2
"""A step that is being copied, and the one before it."""
MOST_OF_FREE = 0.5
"""Of the host's free memory: the rest is for what a run allocates later."""


class StateKeeper:
    """One per host with trainer ranks. Called by `MemoryCheckpoint` on the driver, one call at a time.

    The memory goes when the actor does, however it ends.
    """

    def __init__(self, *, job: str, shm_dir: str, free_nbytes: Callable[[], int] = free_host_nbytes) -> None:
        begin_actor()
        self._free_nbytes = free_nbytes
        self._job, self._shm_dir = job, Path(shm_dir)
        self._arenas: dict[int, NodeArena] = {}
        self._plans: dict[int, SyncPlan] = {}

    def reserve(self, plans: Mapping[int, bytes]) -> int:
        """An arena for each rank, for a state that its plan describes; the bytes of all of them.

        Raises ConfigError if that is more than this host can spare.
        """
        self._plans = {rank: SyncPlan.decode(plan) for rank, plan in plans.items()}
        needed = SLOTS * sum(plan.layout.nbytes for plan in self._plans.values())
        require_free_bytes(self._shm_dir, needed)
        if needed > (most := MOST_OF_FREE * self._free_nbytes()):
            raise ConfigError(
                f"{needed / 2**30:.2f} GiB are more than half of the host's free memory, {most / 2**30:.2f} GiB"
            )
        for rank, plan in self._plans.items():
            self._arenas[rank] = NodeArena.create(
                shm_dir=self._shm_dir, job=self._job, node=f"state-{rank}", layout=plan.layout, slots=SLOTS
            )
        return needed

    def begin(self, step: int) -> dict[int, str]:
        """Open the spare slots for the state after `step`; their paths, by rank."""
        return {rank: str(arena.begin(step)) for rank, arena in self._arenas.items()}

    def commit(self, step: int, digests: Mapping[int, bytes]) -> None:
        """The open slots hold it, and every rank of the run has left its part."""
        for rank, arena in self._arenas.items():
            arena.commit(step, Manifest(step, self._plans[rank], np.frombuffer(digests[rank], np.uint64)))

    def arenas_of(self, step: int) -> dict[int, str]:
        """Where ranks find what they left after `step`. What this host has of a later step is given up: others lack it.

        Raises IntegrityError if it is not here.
        """
        for rank, arena in self._arenas.items():
            arena.drop()
            if arena.version != step and arena.previous_version == step:
                arena.rollback()
            if arena.version != step:
                raise IntegrityError(f"the state of rank {rank} here is that of step {arena.version}", version=step)
        return {rank: str(arena.directory) for rank, arena in self._arenas.items()}

    def close(self) -> None:
        """Free the memory. Idempotent."""
        for arena in self._arenas.values():
            arena.close()
        self._arenas = {}
