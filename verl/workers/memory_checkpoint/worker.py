"""A trainer rank's end of a checkpoint in memory, as methods of a worker."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from functools import cached_property

from verl.single_controller import Dispatch, Worker, register
from verl.workers.engine.snapshots import Places, State
from verl.workers.memory_checkpoint.rank import RankMemory
from verl.workers.memory_checkpoint.resharded import Left, Resharded, StateDescription

RNG = "rng."
"""The prefix of random generators in a snapshot: each rank has its own."""


class RememberedWorker(Worker, ABC):
    """A worker whose state can be kept in memory and restored. `MemoryCheckpoint` calls it on all ranks at once."""

    @abstractmethod
    def snapshot(self) -> State:
        """The state of this rank, always under the same names: see `Rememberable`."""

    @abstractmethod
    def restore(self, saved: State) -> None:
        """The inverse of `snapshot`. A collective."""

    @abstractmethod
    def places(self) -> Places | None:
        """The places of `snapshot`: see `Reshardable`. None if the engine does not support it."""

    @abstractmethod
    def before_step(self) -> None:
        """Called before values of `snapshot` change. It must wait for running copies."""

    @property
    def is_rememberable(self) -> bool:
        return True

    def seed_anew(self, step: int) -> None:
        """Seed this rank's random generators after restoring another number of ranks, whose generators do not fit."""

    @cached_property
    def _memory(self) -> RankMemory:
        return RankMemory(self.snapshot)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def describe_state(self) -> StateDescription | None:
        """The description of this rank's state; None if the engine cannot keep it in memory."""
        if not self.is_rememberable:
            return None
        return StateDescription(self._memory.plan.encode(), self.places())

    @register(dispatch_mode=Dispatch.ALL_TO_ALL, blocking=False)
    def copy_state(self, slot: str) -> None:
        """Begin to copy the state into `slot`, while training goes on."""
        self._memory.begin_copy(slot)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, blocking=False)
    async def copied_state(self) -> bytes:
        """Wait for the copy of `copy_state`; return its digests."""
        return await self._memory.copied()

    @register(dispatch_mode=Dispatch.ALL_TO_ALL)
    def check_state(self, arena: str, step: int) -> None:
        """Digest the state in `arena` after `step`. Raises IntegrityError if it has changed."""
        self._memory.check(arena, step)

    @register(dispatch_mode=Dispatch.ALL_TO_ALL)
    def restore_state(self, arena: str, step: int) -> None:
        """Restore the state in `arena` after `step`. Called after all ranks have checked theirs."""
        self.before_step()
        self._memory.load(arena, step, self.restore)

    @register(dispatch_mode=Dispatch.ALL_TO_ALL)
    def check_resharded(self, left: Sequence[Left], host: str) -> None:
        """Read this rank's parts of the states that another number of ranks `left`. `host`: this host's address.

        Raises IntegrityError if a part is missing or has changed.
        """
        with self._resharded(left, host) as saved:
            saved.check()

    @register(dispatch_mode=Dispatch.ALL_TO_ALL)
    def restore_resharded(self, left: Sequence[Left], host: str, step: int) -> None:
        """Restore from the states `left` after `step`, after all ranks have checked. Random generators are reseeded."""
        self.before_step()
        with self._resharded(left, host) as saved:
            self.restore(saved)
        self.seed_anew(step)

    def _resharded(self, left: Sequence[Left], host: str) -> Resharded:
        own = {name: value for name, value in self.snapshot().items() if not name.startswith(RNG)}
        return Resharded(own, self.places() or {}, left, host=host)
