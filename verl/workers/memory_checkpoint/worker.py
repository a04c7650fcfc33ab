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
"""So the names of random generators begin in a snapshot: each rank has its own."""


class RememberedWorker(Worker, ABC):
    """A worker whose state is left in memory, and given to others. Called by `MemoryCheckpoint`, all ranks at once."""

    @abstractmethod
    def snapshot(self) -> State:
        """The state of this rank, under names that stay: see `Rememberable`."""

    @abstractmethod
    def restore(self, saved: State) -> None:
        """The inverse. A collective."""

    @abstractmethod
    def places(self) -> Places | None:
        """Of `snapshot`: see `Reshardable`. None if that is not known."""

    @abstractmethod
    def before_step(self) -> None:
        """Called before anything that `snapshot` shows changes. Has to await what is copied out of it."""

    @property
    def is_rememberable(self) -> bool:
        return True

    def seed_anew(self, step: int) -> None:
        """After the state of another number of ranks was taken: their random generators are not this rank's."""

    @cached_property
    def _memory(self) -> RankMemory:
        return RankMemory(self.snapshot)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def describe_state(self) -> StateDescription | None:
        """What this rank leaves in memory; None if its state cannot be kept there."""
        if not self.is_rememberable:
            return None
        return StateDescription(self._memory.plan.encode(), self.places())

    @register(dispatch_mode=Dispatch.ALL_TO_ALL, blocking=False)
    def copy_state(self, slot: str) -> None:
        """Begin to copy the state into `slot`; training goes on meanwhile."""
        self._memory.begin_copy(slot)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, blocking=False)
    async def copied_state(self) -> bytes:
        """Digests of what `copy_state` has copied, once it is."""
        return await self._memory.copied()

    @register(dispatch_mode=Dispatch.ALL_TO_ALL)
    def check_state(self, arena: str, step: int) -> None:
        """Digest what was left in `arena` after `step`. Raises IntegrityError if it is not as it was left."""
        self._memory.check(arena, step)

    @register(dispatch_mode=Dispatch.ALL_TO_ALL)
    def restore_state(self, arena: str, step: int) -> None:
        """Take what was left in `arena` after `step`, once all ranks have checked theirs."""
        self.before_step()
        self._memory.load(arena, step, self.restore)

    @register(dispatch_mode=Dispatch.ALL_TO_ALL)
    def check_resharded(self, left: Sequence[Left], host: str) -> None:
        """Read what this rank needs of what another number of ranks `left`; its own `host` is at this address.

        Raises IntegrityError unless all of it is there, as it was left.
        """
        with self._resharded(left, host) as saved:
            saved.check()

    @register(dispatch_mode=Dispatch.ALL_TO_ALL)
    def restore_resharded(self, left: Sequence[Left], host: str, step: int) -> None:
        """Take what was `left` after `step`, once all ranks have checked theirs. Random generators begin anew."""
        self.before_step()
        with self._resharded(left, host) as saved:
            self.restore(saved)
        self.seed_anew(step)

    def _resharded(self, left: Sequence[Left], host: str) -> Resharded:
        own = {name: value for name, value in self.snapshot().items() if not name.startswith(RNG)}
        return Resharded(own, self.places() or {}, left, host=host)
