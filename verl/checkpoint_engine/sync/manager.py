"""`CheckpointEngineManager`: brings the trainer's weights to every replica, one transaction per call.

    manager = CheckpointEngineManager(config=config, trainers=ranks, nodes=nodes, report_path=path)
    await manager.add_replicas(replicas)
    report = await manager.update_weights(global_steps)

It runs on the driver, in one event loop. It calls members through ports, which hide the process of each member.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Sequence
from pathlib import Path

import msgspec

from ..config import CheckpointEngineConfig
from ..errors import (
    ActivationError,
    CheckpointEngineError,
    ConfigError,
    SyncAborted,
)
from ..plan.sync_plan import SyncPlan
from ..plan.types import SyncReport
from ..ports import Replica
from ..registry import resolve_backend
from ..support.records import append
from .deadline import all_within, carried_through, each_within
from .delta_policy import DeltaPolicy
from .members import NodePort, TrainerPort
from .membership import Held, Membership
from .outliers import COMPARED, outlier
from .stopwatch import Stopwatch
from .transaction import Boundary, Fleet, SyncTransaction

logger = logging.getLogger(__name__)


class CheckpointEngineManager:
    """Runs the syncs of one trainer with any number of replicas on rollout nodes. Nodes and replicas may join later."""

    def __init__(
        self,
        *,
        config: CheckpointEngineConfig,
        trainers: Sequence[TrainerPort],
        nodes: Sequence[NodePort],
        report_path: Path | None = None,
        on_report: Sequence[Callable[[SyncReport], None]] = (),
        looks_anew: bool = False,
    ) -> None:
        """`on_report`: each is called with the report of every sync, aborted ones included. `looks_anew`: before every
        sync the manager requests the shards of all ranks, because they may have changed.

        Raises ConfigError or BackendUnavailable for a backend that cannot work; nothing has started then."""
        if not trainers or not nodes:
            raise ConfigError("a sync needs at least one trainer rank and one rollout node")
        self._engine_class = resolve_backend(config)
        self._config = config
        self._membership = Membership(config, self._engine_class, trainers, nodes, looks_anew=looks_anew)
        self._replicas: dict[str, Replica] = {}
        self._quarantined: dict[str, Replica] = {}
        self._report_path = report_path
        self._on_report = on_report
        self._held: Held | None = None
        self._version: int | None = None
        self._deltas = DeltaPolicy(config, possible=self._engine_class.capabilities.deltas)
        self._earlier: deque[SyncReport] = deque(maxlen=COMPARED)
        self._attempt = 0
        self._lock = asyncio.Lock()

    @property
    def version(self) -> int | None:
        """The version in service; None before the first sync."""
        return self._version

    @property
    def replicas(self) -> list[Replica]:
        """Replicas in service."""
        return list(self._replicas.values())

    @property
    def quarantined(self) -> list[Replica]:
        """Replicas out of service: paused, of unknown version, or dead. `add_replicas` brings one back."""
        return list(self._quarantined.values())

    @property
    def late_nodes(self) -> bool:
        """Whether a rollout node can join after the first sync: the backend lets one node fetch a version alone."""
        return self._engine_class.capabilities.late_nodes

    async def update_weights(
        self, global_steps: int, *, boundary: Boundary | None = None, released: Callable[[], None] | None = None
    ) -> SyncReport:
        """Bring the trainer's current weights to every replica as version `global_steps`.

        `boundary` is awaited before `commit`. It returns when rollouts may get new weights, and must end by itself. A
        CheckpointEngineError that it raises aborts the sync.
        The trainer must not change its weights before this method returns. With `released`, the trainer may go on:
        `released` is called on this event loop once every rank has begun to copy. Each rank then calls
        `TrainerRank.await_copied` before it changes weights, and the sync does not retry.

        Raises SyncAborted, its cause being the first failure; every healthy replica then serves the previous version.
        The next call plans and connects again, so members may be replaced in between. Raises errors of
        `Membership.prepared` (ConfigError, PlanError, a dead member) unchanged.
        """
        async with self._lock:
            members = self._membership
            clock = Stopwatch()
            with clock.phase("prepare"):
                plan = await members.prepared(clock)
            fleet = Fleet(
                members.trainers,
                members.nodes,
                members.arena_paths,
                self.replicas,
                plan,
                same_host=self._engine_class.capabilities.same_host,
                senders_serve=not self._engine_class.capabilities.one_sided,
                reconnect=lambda: members.reconnect(plan, clock),
            )
            transaction = SyncTransaction(
                global_steps,
                fleet,
                self._config,
                clock,
                boundary=boundary,
                released=released,
                deltas=self._deltas.request(self._base_for(plan), plan, across_hosts=members.is_across_hosts),
                attempt=self._attempt,
            )
            try:
                report = await transaction.run()
            except (SyncAborted, asyncio.CancelledError) as exc:
                self._quarantine(transaction.quarantined)
                if transaction.committed:
                    self._committed(transaction, plan)
                else:
                    members.connect_anew()
                self._record(transaction.report("committed" if transaction.committed else "aborted", exc))
                raise
            self._committed(transaction, plan)
            if not report.retries:
                self._deltas.learn(plan, report.phase_s, report.delta)
            if self._engine_class.capabilities.connects_once:
                members.connect_anew()
            self._quarantine(transaction.quarantined)
            self._record(report)
            return report

    def _base_for(self, plan: SyncPlan) -> int | None:
        """The version from which deltas may lead: everybody holds the same pieces of it."""
        return self._held.version if self._held is not None and self._held.plan is plan else None

    def _committed(self, transaction: SyncTransaction, plan: SyncPlan) -> None:
        self._version = transaction.version
        self._held = Held(
            version=transaction.version,
            plan=plan,
            trainers=self._membership.trainer_members,
            digests=transaction.digests,
        )

    async def add_nodes(self, nodes: Iterable[NodePort]) -> None:
        """Add rollout nodes to later syncs; one with the name of a known node replaces it.

        Each new node first reads the version in service from the trainer ranks' memory. Replicas continue to serve.
        `add_replicas` then brings replicas on these nodes into service. The next sync plans and connects again.

        Raises ConfigError, before anything begins, for a backend without `late_nodes`. Raises the error of a node that
        could not get the version, for instance TransportError because the ranks hold a later one. That node does not
        join; the others do.
        """
        async with self._lock:
            added = list(nodes)
            failures: dict[str, CheckpointEngineError] = {}
            if self._version is not None:
                if not self.late_nodes:
                    raise ConfigError(
                        f"checkpoint_engine.backend={self._config.backend}: a rollout node cannot join after the first "
                        "sync, because its nodes cannot fetch a version alone. Use tcp, nixl, mooncake or "
                        "kimi_ckpt_engine"
                    )
                calls = {node.name: self._membership.join(node, self._held) for node in added}
                failures = await each_within(
                    sum(vars(self._config.deadlines).values()), calls, version=self._version, phase="join"
                )
            for node in added:
                if node.name not in failures:
                    self._membership.add_node(node)
            if failures:
                raise next(iter(failures.values()))

    async def replace_trainers(self, trainers: Sequence[TrainerPort]) -> None:
        """Replace all trainer ranks, for instance because some died. Calls no member.

        Nodes and replicas keep the version in service. The next sync plans and connects again. It may repeat a version
        number: `SyncReport.attempt` distinguishes the reports.
        """
        async with self._lock:
            self._membership.replace_trainers(trainers)
            self._held = None
            self._attempt += 1

    async def remove_nodes(self, nodes: Iterable[NodePort]) -> None:
        """Remove rollout nodes from later syncs, for instance because their host is gone. Calls no member. Remove the
        replicas on them first. The next sync plans and connects again."""
        async with self._lock:
            self._membership.remove_nodes(nodes)

    async def add_replicas(self, replicas: Iterable[Replica], *, catch_up: bool = True) -> None:
        """Bring replicas into service. With `catch_up` each first loads the current version from its node's arena; the
        trainer goes on. Without it, they load the next version at the next sync.

        Raises ActivationError naming a replica that could not load it: it is quarantined, the others are in service.
        """
        async with self._lock:
            added = list(replicas)
            failures: dict[str, CheckpointEngineError] = {}
            if self._version is not None and catch_up:
                failures = await carried_through(
                    each_within(
                        self._config.deadlines.activate_s,
                        {replica.name: self._catch_up(replica, self._version) for replica in added},
                        version=self._version,
                        phase="activate",
                    )
                )
            for replica in added:
                target = self._quarantined if replica.name in failures else self._replicas
                self._replicas.pop(replica.name, None)
                self._quarantined.pop(replica.name, None)
                target[replica.name] = replica
            if failures:
                error = next(iter(failures.values()))
                raise ActivationError(
                    error.message, version=self._version, phase="activate", member=error.member
                ) from error

    async def remove_replicas(self, replicas: Iterable[Replica]) -> None:
        """Remove replicas from service. Their engines are not touched."""
        async with self._lock:
            for replica in replicas:
                self._replicas.pop(replica.name, None)
                self._quarantined.pop(replica.name, None)

    async def abort_replicas(self) -> None:
        """Stop generation on every replica; requests in flight return the tokens generated so far."""
        await self._everywhere({replica.name: replica.pause("abort") for replica in self.replicas})

    async def resume_generation_replicas(self) -> None:
        await self._everywhere({replica.name: replica.resume() for replica in self.replicas})

    async def sleep_replicas(self) -> None:
        """Free the weights and KV caches of engines that can; call `wake_up_replicas` before the next sync."""
        await self._everywhere({replica.name: replica.sleep() for replica in self.replicas})

    async def wake_up_replicas(self) -> None:
        """Allocate the engines' weights and KV caches again; the next sync, or `add_replicas`, fills them."""
        await self._everywhere({replica.name: replica.wake_up() for replica in self.replicas})

    async def release_kv_cache_replicas(self) -> None:
        await self._everywhere({replica.name: replica.release_kv_cache() for replica in self.replicas})

    async def resume_kv_cache_replicas(self) -> None:
        await self._everywhere({replica.name: replica.resume_kv_cache() for replica in self.replicas})

    async def close(self) -> None:
        """Close the connections and arenas of all members. Idempotent; errors of dead members are logged."""
        members = {member.name: member.close() for member in self._membership.everybody}
        failures = await each_within(self._config.deadlines.commit_s, members, version=self._version, phase="close")
        for error in failures.values():
            logger.info("while closing: %s", error)

    async def _catch_up(self, replica: Replica, version: int) -> None:
        await self._membership.node_at(replica.node_index).reverify(version)
        await replica.pause(self._config.pause_mode)
        await replica.activate(self._membership.arena_paths[replica.node_index], version)
        await replica.resume()

    async def _everywhere(self, calls: dict[str, Awaitable[None]]) -> None:
        await all_within(
            self._config.deadlines.resume_s,
            calls,
            version=self._version,
            phase="control",
        )

    def _quarantine(self, failures: dict[str, CheckpointEngineError]) -> None:
        for name in failures:
            self._quarantined[name] = self._replicas.pop(name)

    def _record(self, report: SyncReport) -> None:
        level = logging.INFO if report.outcome == "committed" else logging.ERROR
        logger.log(
            level,
            "version %d %s in %.3f s (%.2f GB/s, trainer blocked %.3f s, generation paused %.3f s%s)",
            report.version,
            report.outcome,
            report.total_s,
            report.gbytes_per_s,
            report.trainer_blocked_s,
            max(report.paused_s.values(), default=0.0),
            f"; {report.delta.summary}" if report.delta is not None else "",
        )
        if (told := outlier(report, self._earlier)) is not None:
            logger.warning("%s", told)
        self._earlier.append(report)
        for tell in self._on_report:
            tell(report)
        if self._report_path is not None:
            append(self._report_path, [msgspec.json.encode(report)], f"the report of version {report.version} is")
