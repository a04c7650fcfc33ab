"""The trainer rank's end of a sync, as methods of an actor worker."""

from __future__ import annotations

from abc import ABC, abstractmethod

from verl.checkpoint_engine.config import CheckpointEngineConfig
from verl.checkpoint_engine.plan.delta_choice import DeltaRequest
from verl.checkpoint_engine.plan.topology import Topology
from verl.checkpoint_engine.ports import WeightSource
from verl.checkpoint_engine.sync.members import Holding, Published
from verl.checkpoint_engine.sync.trainer_rank import TrainerRank
from verl.single_controller import Worker


class WeightPublisher(Worker, ABC):
    """A worker whose weights the checkpoint engine sends. Called by `RayTrainerRank`, one rank at a time.

    The async methods run beside the rank's own thread and answer while that is busy. They copy on a thread of the
    sync's and start no collective, so the rank may go on; it calls `await_copied` before it changes its weights.
    """

    _participant: TrainerRank | None = None

    @abstractmethod
    def weight_source(self) -> WeightSource:
        """The weights that this rank holds."""

    async def describe_weights(self, config: CheckpointEngineConfig) -> Holding:
        """First call of a sync: return this rank's specs and shards. `config` is valid until `close_weight_sync`."""
        if self._participant is None:
            self._participant = TrainerRank(self.rank, self.weight_source(), config)
        return await self._participant.describe()

    async def prepare_weight_sync(self, plan: bytes) -> str:
        return await self._sync.prepare(plan)

    async def connect_weight_sync(self, topology: Topology) -> None:
        await self._sync.connect(topology)

    async def sync_rollout_weights_by_checkpoint(
        self, version: int, slots: dict[str, str], waits: bool = True, deltas: DeltaRequest | None = None
    ) -> None:
        """Publish: copy this rank's shards, cast to the rollout dtype, out of the trainer. No gather, no collective.

        `slots`: paths of the nodes' spare slots. `waits`: return when the copy is made, not when it has begun.
        `deltas`: the rank may send deltas.
        """
        await self._sync.publish(version, slots, waits, deltas)

    async def published_weight_sync(self, version: int) -> Published:
        """Wait until the publication is copied and digested, while the rank's own thread trains on."""
        return await self._sync.published(version)

    def await_copied(self) -> None:
        """Called on the rank's own thread before its weights change; see `TrainerRank.await_copied`."""
        if self._participant is not None:
            self._participant.await_copied()

    async def serve_weight_sync(self, version: int) -> int:
        """Send the publication in the stage phase, while the rank's own thread trains on."""
        return await self._sync.serve(version)

    async def close_weight_sync(self) -> None:
        if self._participant is not None:
            await self._participant.close()
            self._participant = None

    @property
    def _sync(self) -> TrainerRank:
        assert self._participant is not None  # the manager describes every rank first
        return self._participant
