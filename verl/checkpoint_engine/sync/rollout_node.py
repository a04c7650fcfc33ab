"""A rollout node as a member of syncs: it receives each version into its arena and verifies it for the engines."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path

import numpy as np

from ..config import CheckpointEngineConfig
from ..errors import PlanError, TransportError
from ..memory.arena import NodeArena, require_free_bytes, require_name
from ..memory.digest import Manifest, differing, named, verify
from ..memory.threads import memory_threads
from ..plan.delta_choice import Staging
from ..plan.member_report import Staged
from ..plan.sync_plan import SyncPlan
from ..plan.types import Member
from ..support.memory import memory_watch
from .participant import Participant

logger = logging.getLogger(__name__)
REPAIRED_OF = 16
"""At most one in this many pieces is fetched again: more wrong pieces are no accident of the transfer."""


class RolloutNode(Participant):
    """One rollout node. It owns its arena. Members with the same `host` share memory; default: this machine's name."""

    def __init__(
        self, index: int, config: CheckpointEngineConfig, *, job: str, shm_dir: Path, host: str | None = None
    ) -> None:
        """Raises ConfigError for a `job` that cannot name a directory."""
        require_name("job", job)
        super().__init__("node", index, config, host)
        self._job = job
        self._shm_dir = shm_dir
        self._plan: SyncPlan | None = None
        self._arena: NodeArena | None = None

    async def check(self, arena_nbytes: int, arenas: int) -> None:
        """Check, before allocation, that the host has memory for `arenas` of `arena_nbytes` and suits the backend.

        Raises ConfigError or BackendUnavailable.
        """
        require_free_bytes(self._shm_dir, arena_nbytes, arenas=arenas)
        self._engine.check_host(self._config)

    async def prepare(self, plan: bytes) -> Member:
        """Create the arena for the plan's layout, unless it exists. Returns this member with address and arena path."""
        return await self._run(lambda: self._prepare(SyncPlan.decode(plan)))

    def _prepare(self, plan: SyncPlan) -> Member:
        if self._arena is not None:
            self._arena.layout = plan.layout
        else:
            self._arena = NodeArena.create(
                shm_dir=self._shm_dir,
                job=self._job,
                node=self.name,
                layout=plan.layout,
                slots=self._config.slots,
            )
        self._plan = plan
        address = self._engine.prepare(plan, self._arena)
        return replace(self._member, address=address, arena=str(self._arena.directory))

    async def begin(self, version: int) -> str:
        """Open the spare slot for `version` and return its path."""
        return await self._run(lambda: str(self._open_arena.begin(version)))

    async def takes_deltas(self, base: int) -> bool:
        """Whether the open slot can be made from version `base` and a delta."""
        return await self._run(lambda: self._engine.takes_deltas(base, self._open_arena))

    async def stage(self, version: int) -> Staged:
        """Receive `version` into the open slot; return when it holds every byte."""
        return await self._run_interruptibly(lambda: self._stage(version))

    def _stage(self, version: int) -> Staged:
        with memory_watch().during("stage"):
            nbytes = self._engine.receive_weights(version, self._open_arena)
        return Staged(nbytes=nbytes, links=self._engine.links(), memory=memory_watch().use_of(self.name, "stage"))

    async def staged(self, version: int) -> Staging:
        """What the `stage` of `version` did with deltas."""
        return await self._run(lambda: self._engine.staging(version))

    async def verify(self, version: int, digests: bytes) -> int:
        """Compare the open slot with the owners' `digests`. Fetches a few wrong pieces again; returns their number.

        Raises IntegrityError naming tensor, piece and owner if pieces stay wrong or the backend cannot fetch them
        again. Raises TransportError if fetching fails.
        """
        return await self._run_interruptibly(lambda: self._verify(self._manifest(version, digests)))

    def _verify(self, manifest: Manifest) -> int:
        region = self._open_arena.slot_view().bytes.numpy()
        arrived = self._engine.digests_on_arrival(manifest.version)
        wrong = differing(region, manifest, threads=memory_threads(), arrived=arrived)
        if not wrong:
            return 0
        is_few = len(wrong) <= max(len(manifest.plan) // REPAIRED_OF, 1)
        if is_few and self._engine.repair_weights(manifest.version, self._open_arena, wrong):
            logger.warning(
                "version %d: %s fetched %d pieces again, which differed from the trainer's: %s",
                manifest.version,
                self.name,
                len(wrong),
                named(manifest.plan, wrong),
            )
        verify(region, manifest, threads=memory_threads(), arrived=self._engine.digests_on_arrival(manifest.version))
        return len(wrong)

    async def commit(self, version: int, digests: bytes) -> None:
        """Make the open slot the current one."""
        await self._run(lambda: self._open_arena.commit(version, self._manifest(version, digests)))

    async def drop(self) -> None:
        """Drop the open slot. Idempotent."""
        await self._run(self._drop)

    def _drop(self) -> None:
        if self._arena is not None:
            self._arena.drop()
        self._engine.close_abandoned()

    async def rollback(self, version: int) -> int | None:
        """Make the previous version current if `version` is; return the version that is current then."""
        return await self._run(lambda: self._rollback(version))

    def _rollback(self, version: int) -> int | None:
        arena = self._open_arena
        arena.drop()
        return arena.rollback() if arena.version == version else arena.version

    async def reverify(self, version: int) -> None:
        """Verify the committed version again, for an engine that loads it after its sync. Raises IntegrityError."""
        await self._run(lambda: self._open_arena.reverify(version, threads=memory_threads()))

    async def close(self) -> None:
        """Close the backend engine and remove the arena."""
        await self._run(self._close)
        self._thread.shutdown(wait=False)

    def _close(self) -> None:
        self._engine.finalize()
        if self._arena is not None:
            self._arena.close()
            self._arena = None

    @property
    def _open_arena(self) -> NodeArena:
        if self._arena is None:
            raise TransportError("the node has no arena: it was never prepared, or was closed", member=self.name)
        return self._arena

    def _manifest(self, version: int, digests: bytes) -> Manifest:
        if self._plan is None:
            raise PlanError("the node has no plan", version=version, member=self.name)
        return Manifest(version, self._plan, np.frombuffer(digests, np.uint64))
