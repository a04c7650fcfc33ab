"""Syncs the trainer's weights to the rollout engines, and repeats a sync after losses."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from concurrent.futures import Future
from typing import Any, TypeVar

from verl.checkpoint_engine.errors import SyncAborted, TransportError
from verl.checkpoint_engine.plan.types import SyncReport
from verl.checkpoint_engine.support.loop_thread import LoopThread
from verl.checkpoint_engine.sync.manager import CheckpointEngineManager
from verl.checkpoint_engine.sync.transaction import Boundary
from verl.trainer.fleet.memory_checkpoint import until_kept
from verl.trainer.fleet.recovery import SERVICE, SYNC, Recovery

T = TypeVar("T")
logger = logging.getLogger(__name__)

FAILED_SYNCS = (SyncAborted, TransportError)
"""Errors of a sync that failed or could not begin."""


class Syncs:
    """The syncs of one run. Used on the driver's main thread; syncs run on the cluster's event loop."""

    def __init__(self, loop: LoopThread, manager: Callable[[], CheckpointEngineManager], recovery: Recovery) -> None:
        """`manager()` returns the current manager."""
        self._loop, self._manager, self._recovery = loop, manager, recovery

    def update_weights(self, version: int, generating: Future[Any] | None = None) -> SyncReport:
        """One transaction; then restart the replicas that it quarantined, if possible.

        Engines keep their version until `generating` has ended, with or without an error. A failed sync is tried once
        more if its lost replicas or rollout nodes could be restarted, or the run can continue without them. Raises
        `FAILED_SYNCS`.
        """

        def sync(failure: Exception | None = None) -> SyncReport:
            if failure is not None:
                logger.warning("syncing again after: %s", failure)
            return self._loop.run(self._update_weights(version, generating))

        report = self._recovery.attempt(SYNC, sync, failures=FAILED_SYNCS, again=sync)
        self._look_after_service()
        return report

    def begin_update(
        self,
        version: int,
        generating: Future[Any] | None,
        then: Callable[[], Awaitable[T]],
        kept: Future[None] | None = None,
    ) -> Future[tuple[SyncReport, T]]:
        """Like `update_weights`, but returns as soon as the trainer may change its weights; call `end_update` later.

        Runs `then` once the engines have the version. They do not get it if the trainer ranks die before `kept`.
        """
        released: Future[None] = Future()

        async def update() -> tuple[SyncReport, T]:
            async def boundary() -> None:
                if generating is not None:
                    await _end_of(generating)()
                if kept is not None:
                    await until_kept(kept, version)

            try:
                report = await self._manager().update_weights(
                    version, boundary=boundary, released=lambda: released.set_result(None)
                )
            finally:
                if not released.done():
                    released.set_result(None)
            return report, await then()

        updating = self._loop.start(update())
        released.result()
        return updating

    def end_update(self, updating: Future[tuple[SyncReport, T]]) -> tuple[SyncReport, T]:
        """Wait for the sync, then restart the replicas that it quarantined, if possible. Raises `FAILED_SYNCS`."""
        result = updating.result()
        self._look_after_service()
        return result

    def _look_after_service(self) -> None:
        if self._manager().quarantined or not self._manager().replicas:
            self._recovery.look(SERVICE)

    async def _update_weights(self, version: int, generating: Future[Any] | None) -> SyncReport:
        if generating is None:
            return await self._manager().update_weights(version)
        return await self._manager().update_weights(version, boundary=_end_of(generating))


def _end_of(generating: Future[Any]) -> Boundary:
    """However it ends."""
    return lambda: asyncio.gather(asyncio.wrap_future(generating), return_exceptions=True)
