"""One sync: publish -> stage -> verify -> commit -> activate -> resume.

The consequence of a failure depends on the phase:

    publish, stage, verify    nodes drop the spare slot; the sync retries `retries` times; then SyncAborted.
                              No retry after `released`: the trainer may have changed its weights
    wait                      `boundary` may refuse the version: nodes drop the spare slot; SyncAborted.
                              The death of a member is noticed at commit
    commit                    nodes that committed roll back, the others drop; SyncAborted
    activate, some replicas   those are quarantined: paused, out of service; the version stays committed
    activate, every replica   the nodes roll back and the replicas load the previous version again; SyncAborted
    resume                    the replica is quarantined

Until `commit`, engines serve the previous version, and a cancelled sync ends there. A sync that is cancelled later ends
in the new version: paused replicas load it within their deadlines and resume; replicas that were not paused yet are
quarantined. A second cancellation does not wait for them.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np

from ..config import CheckpointEngineConfig
from ..errors import (
    ActivationError,
    CheckpointEngineError,
    IntegrityError,
    SyncAborted,
    TransportError,
)
from ..memory.digest import Manifest
from ..plan.delta_choice import DeltaReport, DeltaRequest
from ..plan.member_report import Link, Staged, busiest, largest
from ..plan.sync_plan import SyncPlan
from ..plan.types import EngineCheckResult, SyncReport
from ..ports import Replica
from ..support.memory import MemoryUse
from .deadline import all_within, carried_through, each_within
from .delta_policy import delta_report
from .members import NodePort, TrainerPort
from .stopwatch import Stopwatch

logger = logging.getLogger(__name__)

T = TypeVar("T")

Boundary = Callable[[], Awaitable[object]]
"""Returns when rollouts may get new weights. Raises CheckpointEngineError if they must not get them."""


@dataclass(frozen=True)
class Fleet:
    """All members and replicas of one sync, connected for one plan."""

    trainers: Sequence[TrainerPort]
    nodes: Sequence[NodePort]
    arena_paths: Mapping[int, str]
    """The directory of each node's arena, by node index."""
    replicas: Sequence[Replica]
    plan: SyncPlan
    same_host: bool = True
    """Trainer ranks write into the slots of nodes, so nodes open their slots first."""
    senders_serve: bool = False
    """Trainer ranks send in the stage phase: the backend is not one-sided."""
    reconnect: Callable[[], Awaitable[None]] | None = None
    """Connects all members again before another attempt."""


@dataclass
class SyncTransaction:
    """Moves one version to all nodes and replicas of one fleet. Used once."""

    version: int
    fleet: Fleet
    config: CheckpointEngineConfig
    clock: Stopwatch
    boundary: Boundary | None = None
    """Awaited between verify and commit."""
    deltas: DeltaRequest | None = None
    """If set, owners may send deltas."""
    released: Callable[[], None] | None = None
    """Called when every rank has begun to copy its shards: the trainer goes on, and calls `await_copied` on each rank
    before it changes weights."""
    attempt: int = 0
    """`SyncReport.attempt`."""
    retries: int = 0
    nbytes_moved: int = 0
    pieces_repaired: int = 0
    trainer_blocked_s: float = 0.0
    paused_s: dict[str, float] = field(default_factory=dict)
    quarantined: dict[str, CheckpointEngineError] = field(default_factory=dict)
    engine_checks: dict[str, EngineCheckResult] = field(default_factory=dict)
    digests: bytes = b""
    """Digests of all pieces, in plan order, after a successful stage and verify."""
    delta: DeltaReport | None = None
    links: tuple[Link, ...] = ()
    memory: tuple[MemoryUse, ...] = ()
    failed_attempts: list[str] = field(default_factory=list)
    committed: bool = False
    """All nodes have committed the version, so replicas may serve it."""
    _is_released: bool = False
    """The trainer may have changed its weights, so this version cannot be published again."""
    _pause_began: dict[str, float] = field(default_factory=dict)

    async def run(self) -> SyncReport:
        """Run all phases. Raises SyncAborted, caused by the first failure, if the fleet keeps the previous version."""
        self.digests = await self._move_with_retries()
        if self.boundary is not None:
            await self._wait(self.boundary)
        await self._commit(self.digests)
        await self._activate()
        return self.report("committed")

    def report(self, outcome: str, error: BaseException | None = None) -> SyncReport:
        nodes = len(self.fleet.nodes)
        return SyncReport(
            version=self.version,
            backend=self.config.backend,
            outcome=outcome,
            nbytes_needed=self.fleet.plan.layout.payload_nbytes * nodes,
            nbytes_moved=self.nbytes_moved,
            phase_s=dict(self.clock.seconds),
            total_s=sum(self.clock.seconds.values()),
            began_s=self.clock.began_s,
            laps=tuple(self.clock.laps),
            trainer_blocked_s=self.trainer_blocked_s,
            paused_s=dict(self.paused_s),
            replicas_updated=tuple(
                replica.name for replica in self.fleet.replicas if replica.name not in self.quarantined
            )
            if outcome == "committed"
            else (),
            replicas_quarantined=tuple(self.quarantined),
            retries=self.retries,
            pieces_repaired=self.pieces_repaired,
            error=str(error) or type(error).__name__ if error else None,
            engine_checks=dict(self.engine_checks),
            delta=self.delta,
            members=self.clock.members,
            links=self.links,
            memory=self.memory,
            failed_attempts=tuple(self.failed_attempts),
            attempt=self.attempt,
        )

    async def _move_with_retries(self) -> bytes:
        while True:
            try:
                return await self._move()
            except (TransportError, IntegrityError) as exc:
                await self._drop()
                if self.retries >= self.config.retries or self._is_released:
                    raise self._aborted(exc) from exc
                self.retries += 1
                self.failed_attempts.append(str(exc))
                logger.warning("version %d: %s; trying again (%d)", self.version, exc, self.retries)
                await self._reconnect(exc)
            except CheckpointEngineError as exc:
                await self._drop()
                raise self._aborted(exc) from exc
            except asyncio.CancelledError:
                await self._drop()
                raise

    async def _reconnect(self, failure: CheckpointEngineError) -> None:
        if self.fleet.reconnect is None or not isinstance(failure, TransportError):
            return
        with self.clock.phase("prepare"):
            try:
                await self.fleet.reconnect()
            except CheckpointEngineError as exc:
                logger.error("version %d: cannot connect again: %s", self.version, exc)  # noqa: TRY400 - told below
                raise self._aborted(failure) from failure

    async def _move(self) -> bytes:
        """Publish, stage and verify; the digests of all pieces."""
        deadlines, nodes, start_s = self.config.deadlines, self.fleet.nodes, time.perf_counter()
        with self.clock.phase("publish"):
            await self._publish()
            if self.released is not None:
                self._is_released = True
                self.released()
            published = await self._all(
                deadlines.publish_s,
                {trainer.name: trainer.published(self.version) for trainer in self.fleet.trainers},
                "publish",
            )
            self._moved("publish", {name: result.nbytes for name, result in published.items()})
            self.trainer_blocked_s = max(result.seconds for result in published.values())
        manifest = Manifest.of(
            self.version,
            self.fleet.plan,
            [np.frombuffer(published[trainer.name].digests, np.uint64) for trainer in self.fleet.trainers],
        )
        digests = manifest.digests.tobytes()
        with self.clock.phase("stage"):
            staged = await self._all(deadlines.stage_s, self._staging(), "stage")
        self._moved("stage", {name: one.nbytes for name, one in staged.items()})
        self.links = busiest(link for one in staged.values() for link in one.links)
        self.memory = (
            *largest(one.memory for one in published.values() if one.memory is not None),
            *largest(one.memory for one in staged.values() if one.memory is not None),
        )
        if self.config.verify:
            with self.clock.phase("verify"):
                repaired = await self._all(
                    deadlines.verify_s, {node.name: node.verify(self.version, digests) for node in nodes}, "verify"
                )
            self.pieces_repaired += sum(repaired.values())
        if self.deltas is not None:
            seconds = time.perf_counter() - start_s
            calls = {node.name: node.staged(self.version) for node in nodes}
            deltas = await self._all(deadlines.verify_s, calls, "verify")
            encoded = [published[trainer.name].encoded for trainer in self.fleet.trainers]
            self.delta = delta_report(self.fleet.plan, self.deltas, encoded, list(deltas.values()), seconds)
        return digests

    def _moved(self, phase: str, nbytes: Mapping[str, int]) -> None:
        self.nbytes_moved += sum(nbytes.values())
        self.clock.moved(phase, nbytes)

    async def _publish(self) -> None:
        """Every node opens its spare slot and every rank copies its shards; at once, unless ranks need the slots.

        Ranks whose trainer goes on meanwhile only begin.
        """
        waits, slots = self.released is None, dict[str, str]()
        calls: dict[str, Awaitable[Any]] = {node.name: node.begin(self.version) for node in self.fleet.nodes}
        asks_nodes = self.deltas is not None and self.fleet.senders_serve
        if self.fleet.same_host or asks_nodes:
            opened, calls = await self._all(self.config.deadlines.publish_s, calls, "publish"), {}
            slots = opened if self.fleet.same_host else slots
        deltas = await self._deltas_for_all() if asks_nodes else self.deltas
        with_deltas = [deltas] if deltas is not None else []
        calls |= {
            trainer.name: trainer.publish(self.version, slots, waits, *with_deltas) for trainer in self.fleet.trainers
        }
        await self._all(self.config.deadlines.publish_s, calls, "publish")

    async def _deltas_for_all(self) -> DeltaRequest | None:
        """What is offered where all nodes get the same, and cannot fetch anything else by themselves."""
        if self.deltas is None or self.retries:  # perhaps it was a delta that did not come out right
            return None
        base = self.deltas.base
        calls = {node.name: node.takes_deltas(base) for node in self.fleet.nodes}
        takes = await self._all(self.config.deadlines.publish_s, calls, "publish")
        return self.deltas if all(takes.values()) else None

    async def _wait(self, boundary: Boundary) -> None:
        try:
            with self.clock.phase("wait"):
                await boundary()
        except CheckpointEngineError as exc:
            await self._drop()
            raise self._aborted(exc) from exc
        except asyncio.CancelledError:
            await self._drop()
            raise

    def _staging(self) -> dict[str, Awaitable[Staged]]:
        """What every node does, and every trainer rank where senders take part."""
        calls: dict[str, Awaitable[Staged]] = {node.name: node.stage(self.version) for node in self.fleet.nodes}
        if self.fleet.senders_serve:
            calls |= {trainer.name: self._serve(trainer) for trainer in self.fleet.trainers}
        return calls

    async def _serve(self, trainer: TrainerPort) -> Staged:
        return Staged(nbytes=await trainer.serve(self.version))

    async def _commit(self, digests: bytes) -> None:
        with self.clock.phase("commit"):
            calls = {node.name: node.commit(self.version, digests) for node in self.fleet.nodes}
            committing = asyncio.ensure_future(
                each_within(
                    self.config.deadlines.commit_s,
                    self.clock.timed("commit", calls),
                    version=self.version,
                    phase="commit",
                )
            )
            try:
                failures = await asyncio.shield(committing)
            except asyncio.CancelledError:  # which nodes have committed is known only at the end
                await committing
                await self._undo_commit()
                raise
            if failures:
                await self._undo_commit()
                cause = next(iter(failures.values()))
                raise self._aborted(cause) from cause
        self.committed = True

    async def _undo_commit(self) -> None:
        """On every node, also those that failed: one that missed its deadline may commit yet, and then rolls back."""
        await self._compensate({node.name: node.rollback(self.version) for node in self.fleet.nodes}, "commit")

    async def _activate(self) -> None:
        try:
            await self._activate_in_waves()
        except asyncio.CancelledError:
            for replica in self.fleet.replicas:
                if replica.name not in self.paused_s:
                    self.quarantined[replica.name] = ActivationError(
                        "cancelled", version=self.version, phase="activate", member=replica.name
                    )
            raise
        if self.fleet.replicas and all(replica.name in self.quarantined for replica in self.fleet.replicas):
            self.committed = False
            cause = next(iter(self.quarantined.values()))
            with self.clock.phase("resume"):
                await self._roll_back()
            raise self._aborted(cause) from cause

    async def _activate_in_waves(self) -> None:
        if self.config.activation == "rolling":
            waves = [[replica] for replica in self.fleet.replicas]
        else:
            waves = [list(self.fleet.replicas)]
        for wave in waves:
            await carried_through(self._serve_version(wave))

    async def _serve_version(self, wave: Sequence[Replica]) -> None:
        with self.clock.phase("activate"):
            ready = await self._load(wave, self.version)
        with self.clock.phase("resume"):
            await self._resume(ready)

    async def _load(self, replicas: Sequence[Replica], version: int) -> list[Replica]:
        """Pause, then load `version`, on every one of `replicas`; those that did both. The others are quarantined."""
        now = time.perf_counter()
        for replica in replicas:
            self._pause_began.setdefault(replica.name, now)
        paused = await self._survivors(
            replicas, {replica.name: replica.pause(self.config.pause_mode) for replica in replicas}, "activate"
        )
        return await self._survivors(
            paused,
            {replica.name: self._activate_one(replica, version) for replica in paused},
            "activate",
        )

    async def _activate_one(self, replica: Replica, version: int) -> None:
        checked = await replica.activate(self.fleet.arena_paths[replica.node_index], version)
        if checked is not None:
            self.engine_checks[replica.name] = checked

    async def _resume(self, replicas: Sequence[Replica]) -> list[Replica]:
        resumed = await self._survivors(replicas, {replica.name: replica.resume() for replica in replicas}, "resume")
        now = time.perf_counter()
        self.paused_s |= {replica.name: now - self._pause_began[replica.name] for replica in resumed}
        return resumed

    async def _survivors(
        self, replicas: Sequence[Replica], calls: Mapping[str, Awaitable[object]], phase: str
    ) -> list[Replica]:
        timeout_s = self.config.deadlines.resume_s if phase == "resume" else self.config.deadlines.activate_s
        timed = self.clock.timed(phase, calls)
        failures = await each_within(timeout_s, timed, version=self.version, phase=phase)
        for name, error in failures.items():
            if not isinstance(error, (ActivationError, IntegrityError)):
                error = ActivationError(error.message, version=self.version, phase=phase, member=name)
            self.quarantined[name] = error
            logger.error("quarantined: %s", error)
        return [replica for replica in replicas if replica.name not in failures]

    async def _roll_back(self) -> None:
        """No replica could load the version: give the previous one back to every replica that still answers."""
        try:
            previous = await self._all(
                self.config.deadlines.commit_s,
                {node.name: node.rollback(self.version) for node in self.fleet.nodes},
                "activate",
            )
        except CheckpointEngineError as exc:
            logger.error("version %d cannot be rolled back: %s", self.version, exc)  # noqa: TRY400 - the cause is told by the abort
            return
        version = next(iter(previous.values()))
        if version is None:  # a node raises before it answers that; the types do not know
            return
        failed = dict(self.quarantined)
        ready = await self._load(self.fleet.replicas, version)
        resumed = [replica.name for replica in await self._resume(ready)]
        logger.warning("rolled back: %s", ", ".join(resumed) or "no replica answers")
        self.quarantined = {name: error for name, error in failed.items() if name not in resumed}

    async def _drop(self) -> None:
        await self._compensate({node.name: node.drop() for node in self.fleet.nodes}, "drop")

    async def _compensate(self, calls: Mapping[str, Awaitable[object]], phase: str) -> None:
        """Undo on every node that answers. A node that does not is logged: its next `begin` starts clean anyway."""
        failures = await each_within(
            self.config.deadlines.commit_s,
            calls,
            version=self.version,
            phase=phase,
        )
        for error in failures.values():
            logger.error("could not undo: %s", error)

    async def _all(self, timeout_s: float, calls: Mapping[str, Awaitable[T]], phase: str) -> dict[str, T]:
        return await all_within(timeout_s, self.clock.timed(phase, calls), version=self.version, phase=phase)

    def _aborted(self, cause: CheckpointEngineError) -> SyncAborted:
        in_service = len(self.fleet.replicas) > len(self.quarantined) or not self.fleet.replicas
        state = "the previous version stays in service" if in_service else "no replica is in service"
        return SyncAborted(
            f"{state}: {type(cause).__name__}: {cause.message}",
            version=self.version,
            phase=cause.phase,
            member=cause.member,
        )
