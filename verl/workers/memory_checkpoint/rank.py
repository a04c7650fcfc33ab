"""A trainer rank's end of a checkpoint in memory: copy the state while training goes on, and restore it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path

from verl.checkpoint_engine.errors import IntegrityError, TransportTimeout
from verl.checkpoint_engine.memory.committed import open_committed
from verl.checkpoint_engine.memory.digest import verify
from verl.checkpoint_engine.memory.publishing import SlotPieces, publish
from verl.checkpoint_engine.memory.slot import SlotView
from verl.checkpoint_engine.memory.threads import memory_threads
from verl.checkpoint_engine.plan.layout import Layout
from verl.checkpoint_engine.plan.shards import ShardTable
from verl.checkpoint_engine.plan.sync_plan import SyncPlan, make_plan
from verl.workers.engine.fsdp.weight_source import FSDPWeightSource
from verl.workers.engine.snapshots import State
from verl.workers.engine.tensors import HeldTensor

BLOCK_NBYTES = 2**20
COPIED_WITHIN_S = 120.0


class RankMemory:
    """Copies one rank's state into slots of an arena. Used on the rank's thread, except `copied`."""

    def __init__(self, snapshot: Callable[[], State]) -> None:
        self._snapshot = snapshot
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="memory-checkpoint")
        self._slots: dict[str, tuple[SlotView, SlotPieces]] = {}
        self._plan: SyncPlan | None = None
        self._copying: Future[bytes] | None = None

    @property
    def plan(self) -> SyncPlan:
        """The plan of this rank's state, of which this rank is the only owner."""
        if self._plan is None:
            source = _source_of(self._snapshot())
            layout = Layout.of(source.specs())
            self._plan = make_plan(layout, [ShardTable.of(layout, source.shards())], block_nbytes=BLOCK_NBYTES)
        return self._plan

    def begin_copy(self, slot: str) -> None:
        """Begin to copy the present state into `slot`; `copied` waits for its digests."""
        source, plan = _source_of(self._snapshot()), self.plan

        def copy() -> bytes:
            publication = publish(source, self._pieces(slot))
            memory = publication.memory
            return publication.digests.completed(
                memory.bytes.numpy(), memory.extents, threads=memory_threads()
            ).tobytes()

        if source.specs() != plan.layout.specs:
            raise IntegrityError("the tensors of the training state have changed")
        self._copying = self._thread.submit(copy)

    async def copied(self) -> bytes:
        """Wait for the copy of `begin_copy`; return its digests in plan order."""
        assert self._copying is not None  # it comes after `begin_copy`
        return await asyncio.wrap_future(self._copying)

    def await_copied(self) -> None:
        """Wait until no copy of the state is running. Raises TransportTimeout."""
        if self._copying is not None and wait([self._copying], COPIED_WITHIN_S).not_done:
            raise TransportTimeout(
                f"the training state is still being copied after {COPIED_WITHIN_S:g} s", phase="publish"
            )

    def check(self, arena: str, step: int) -> None:
        """Raises IntegrityError unless `arena` has this rank's complete state after `step`."""
        with open_committed(arena, step) as (manifest, view):
            if manifest.plan.layout.digest != self.plan.layout.digest:
                raise IntegrityError(f"{arena} holds the state of another model", version=step)
            verify(view.bytes.numpy(), manifest, threads=memory_threads())

    @staticmethod
    def load(arena: str, step: int, restore: Callable[[State], None]) -> None:
        """Call `restore` with the state that `check` has verified."""
        with open_committed(arena, step) as (_, view):
            restore(dict(view.tensors()))

    def _pieces(self, slot: str) -> SlotPieces:
        if slot not in self._slots:
            for path in [known for known in self._slots if not Path(known).exists()]:  # it was replaced
                self._slots.pop(path)[0].close()
            view = SlotView(Path(slot), self.plan.layout, writable=True)
            self._slots[slot] = view, SlotPieces(view, self.plan, owner=0)
        return self._slots[slot][1]


def _source_of(state: State) -> FSDPWeightSource:
    """Of tensors that travel as they are."""
    held = {name: HeldTensor.whole(tensor, is_parameter=False) for name, tensor in state.items() if tensor.numel()}
    return FSDPWeightSource(held, rollout_dtype="float32")
