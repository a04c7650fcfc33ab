"""A rollout node as a member of syncs: its arena takes each version in, and is checked before engines load from it."""

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
"""At most one of so many pieces is fetched again: where more are wrong, it was no accident on the way."""


class RolloutNode(Participant):
    """One rollout node: owns its arena. `host` as for a trainer rank."""

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
        """Check, before anything is allocated, the memory for the host's `arenas` and the backend's needs of a host.

        Raises ConfigError or BackendUnavailable.
        """
        require_free_bytes(self._shm_dir, arena_nbytes, arenas=arenas)
        self._engine.check_host(self._config)

    async def prepare(self, plan: bytes) -> Member:
        """Create the arena for versions of the plan's layout, unless it exists; returns its address."""
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
        """Open the spare slot for `version`; its path."""
        return await self._run(lambda: str(self._open_arena.begin(version)))

    async def takes_deltas(self, base: int) -> bool:
        """Whether a delta to version `base` is enough for the open slot."""
        return await self._run(lambda: self._engine.takes_deltas(base, self._open_arena))

    async def stage(self, version: int) -> Staged:
        """Return when the open slot holds every byte."""
        return await self._run_interruptibly(lambda: self._stage(version))

    def _stage(self, version: int) -> Staged:
        with memory_watch().during("stage"):
            nbytes = self._engine.receive_weights(version, self._open_arena)
        return Staged(nbytes=nbytes, links=self._engine.links(), memory=memory_watch().use_of(self.name, "stage"))

    async def staged(self, version: int) -> Staging:
        """The result of the last `stage`."""
        return await self._run(lambda: self._engine.staging(version))

    async def verify(self, version: int, digests: bytes) -> int:
        """Compare the digests of the open slot; the number of pieces that were wrong and had to be fetched again.

        Raises IntegrityError that names tensor, piece and owner of pieces that stay wrong, or that the backend cannot
        fetch again; TransportError if fetching fails.
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
        """Forget the open slot. Idempotent."""
        await self._run(self._drop)

    def _drop(self) -> None:
        if self._arena is not None:
            self._arena.drop()
        self._engine.close_abandoned()

    async def rollback(self, version: int) -> int | None:
        """Make the previous version current; that version."""
        return await self._run(lambda: self._rollback(version))

    def _rollback(self, version: int) -> int | None:
        arena = self._open_arena
        arena.drop()
        return arena.rollback() if arena.version == version else arena.version

    async def reverify(self, version: int) -> None:
        """Check the committed version again, before an engine loads it long after its sync. Raises IntegrityError."""
        await self._run(lambda: self._open_arena.reverify(version, threads=memory_threads()))

    async def close(self) -> None:
        """Remove the arena."""
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
