"""The trainer ranks and rollout nodes of the next syncs. It plans and connects per plan, and per node that joins."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from ..checkpoint_engine import CheckpointEngine
from ..config import CheckpointEngineConfig
from ..errors import PlanError, TransportError
from ..plan.layout import Layout
from ..plan.shards import ShardTable
from ..plan.sync_plan import SyncPlan, make_plan
from ..plan.topology import TOPOLOGIES, Topology, direct
from ..plan.types import Member
from .deadline import all_within, each_within
from .members import Holding, MemberPort, NodePort, TrainerPort
from .stopwatch import Stopwatch

logger = logging.getLogger(__name__)

T = TypeVar("T")

ANSWERS_WITHIN_S = 20.0
"""After a failed attempt, a member that does not answer a ping within this time ends the sync."""


@dataclass(frozen=True, kw_only=True)
class Held:
    """The committed version that trainer ranks still hold in their regions, until they publish the next one."""

    version: int
    plan: SyncPlan
    trainers: Sequence[Member]
    digests: bytes


class Membership:
    """Trainer ranks and rollout nodes, connected now or at the next sync.

    The manager owns it and calls one method at a time.
    """

    def __init__(
        self,
        config: CheckpointEngineConfig,
        engine_class: type[CheckpointEngine],
        trainers: Sequence[TrainerPort],
        nodes: Sequence[NodePort],
        *,
        looks_anew: bool = False,
    ) -> None:
        """`looks_anew`: the shards of ranks may change between syncs, so `prepared` requests them before each."""
        self._looks_anew = looks_anew
        self.trainers = list(trainers)
        self.nodes = list(nodes)
        self.arena_paths: dict[int, str] = {}
        """Node index to the directory of its arena. The same mapping as long as this lives."""
        self.trainer_members: list[Member] = []
        """The trainer ranks of the last or the running publish."""
        self._config = config
        self._engine_class = engine_class
        self._plan: SyncPlan | None = None
        """That everybody is connected for."""
        self._planned: tuple[list[tuple[str, bytes]], SyncPlan] | None = None
        """What ranks held when it was planned last, and the plan: it is made anew only if they hold something else."""
        self._holdings: list[Holding] = []
        self._node_at: dict[int, NodePort] = {}
        self._node_members: list[Member] = []

    @property
    def everybody(self) -> list[MemberPort]:
        return [*self.trainers, *self.nodes]

    @property
    def is_across_hosts(self) -> bool:
        return not direct(self.trainer_members, self._node_members).is_on_one_host

    def node_at(self, index: int) -> NodePort:
        """The node with this index: `Replica.node_index`."""
        return self._node_at[index]

    def connect_anew(self) -> None:
        """Make the next sync plan and connect again."""
        self._plan = None

    def replace_trainers(self, trainers: Sequence[TrainerPort]) -> None:
        self.trainers = list(trainers)
        self.connect_anew()

    def add_node(self, node: NodePort) -> None:
        """Add a rollout node; it replaces one of the same name."""
        self.nodes = [*(known for known in self.nodes if known.name != node.name), node]
        self.connect_anew()

    def remove_nodes(self, nodes: Iterable[NodePort]) -> None:
        leaving = {node.name for node in nodes}
        self.nodes = [node for node in self.nodes if node.name not in leaving]
        self.connect_anew()

    async def prepared(self, clock: Stopwatch) -> SyncPlan:
        """Return the plan for the present members. Plans and connects on the first sync, after a failed one, and when
        the shards of a rank have changed."""
        if self._plan is None or self._looks_anew:
            timeout_s = self._config.deadlines.prepare_s
            holdings = await all_within(
                timeout_s,
                clock.timed("prepare", {trainer.name: trainer.describe() for trainer in self.trainers}),
                version=None,
                phase="prepare",
            )
            self._holdings = list(holdings.values())
            held = [(holding.layout_digest, holding.shards) for holding in self._holdings]
            if self._planned is None or self._planned[0] != held:
                self._planned = held, plan_of(self._holdings, block_nbytes=self._config.block_nbytes)
                self._plan = None
            if self._plan is None:
                await self._connect(self._planned[1], clock)
                self._plan = self._planned[1]
        return self._plan

    async def reconnect(self, plan: SyncPlan, clock: Stopwatch) -> None:
        """Connect all members again, for another attempt. Raises TransportTimeout first if a member does not answer."""
        timeout_s = min(ANSWERS_WITHIN_S, self._config.deadlines.prepare_s)
        pings = clock.timed("prepare", {member.name: member.ping() for member in self.everybody})
        await all_within(timeout_s, pings, version=None, phase="prepare")
        await self._connect(plan, clock)

    async def _connect(self, plan: SyncPlan, clock: Stopwatch) -> None:
        encoded = plan.encode()

        async def everywhere(calls: Mapping[str, Awaitable[T]]) -> dict[str, T]:
            timed = clock.timed("prepare", calls)
            return await all_within(self._config.deadlines.prepare_s, timed, version=None, phase="prepare")

        nodes = await everywhere({node.name: node.prepare(encoded) for node in self.nodes})
        addresses = await everywhere({trainer.name: trainer.prepare(encoded) for trainer in self.trainers})
        trainers = [
            Member(
                role="trainer",
                index=index,
                host=holding.host,
                address=addresses[trainer.name],
                host_addresses=holding.host_addresses,
            )
            for index, (trainer, holding) in enumerate(zip(self.trainers, self._holdings, strict=True))
        ]
        topology = self._topology(trainers, list(nodes.values()))
        # Those who are read learn first from where they will be.
        together: list[Sequence[MemberPort]] = [self.everybody]
        if self._engine_class.capabilities.one_sided:
            together = [self.trainers, self.nodes]
        for members in together:
            await everywhere({member.name: member.connect(topology) for member in members})
        # In place: a sync that connects anew has this mapping.
        self.arena_paths.update({node.index: node.arena for node in nodes.values()})
        self._node_at = {nodes[node.name].index: node for node in self.nodes}
        self.trainer_members, self._node_members = trainers, list(nodes.values())

    def _topology(self, trainers: Sequence[Member], nodes: Sequence[Member]) -> Topology:
        if self._config.topology not in ("auto", self._engine_class.capabilities.topologies[0]):
            return TOPOLOGIES[self._config.topology](trainers, nodes)
        return self._engine_class.build_topology(trainers, nodes)

    async def join(self, node: NodePort, held: Held | None) -> None:
        """Bring the version in service to `node` alone. Raises TransportError if no rank holds it."""
        deadlines = self._config.deadlines
        if held is None:  # a version is in service, but the trainer ranks that published it are not there any more
            raise TransportError("no rank has the version in service until the next sync", member=node.name)
        version = held.version

        async def step(phase: str, timeout_s: float, call: Awaitable[T]) -> T:
            return (await all_within(timeout_s, {node.name: call}, version=version, phase=phase))[node.name]

        try:
            member = await step("prepare", deadlines.prepare_s, node.prepare(held.plan.encode()))
            await self._let_in(member, held, version)
            topology = self._topology(held.trainers, [member])
            await step("prepare", deadlines.prepare_s, node.connect(topology))
            await step("stage", deadlines.stage_s, node.begin(version))
            await step("stage", deadlines.stage_s, node.stage(version))
            if self._config.verify:
                await step("verify", deadlines.verify_s, node.verify(version, held.digests))
            await step("commit", deadlines.commit_s, node.commit(version, held.digests))
        except BaseException:
            dropped = {node.name: node.drop()}
            for error in (await each_within(deadlines.commit_s, dropped, version=version, phase="drop")).values():
                logger.warning("could not undo: %s", error)
            raise
        self._node_at[member.index] = node
        self.arena_paths[member.index] = member.arena

    async def _let_in(self, node: Member, held: Held, version: int) -> None:
        """Tell the trainer ranks of a node on a host from which they let nobody in so far."""
        known = self._topology(held.trainers, self._node_members)
        if set(node.host_addresses) <= {address for member in known.members for address in member.host_addresses}:
            return
        wider = self._topology(held.trainers, [*self._node_members, node])
        calls = {trainer.name: trainer.connect(wider) for trainer in self.trainers}
        await all_within(self._config.deadlines.prepare_s, calls, version=version, phase="prepare")
        self._node_members.append(node)


def plan_of(holdings: Sequence[Holding], *, block_nbytes: int) -> SyncPlan:
    """The plan for these trainer ranks. Raises PlanError naming the ranks that describe another model than rank 0."""
    strangers = [
        str(rank) for rank, holding in enumerate(holdings) if holding.layout_digest != holdings[0].layout_digest
    ]
    if strangers:
        raise PlanError(f"trainer ranks {', '.join(strangers)} describe another model than rank 0")
    layout = Layout.decode(holdings[0].layout)
    tables = [ShardTable.decode(holding.shards) for holding in holdings]
    for table in tables:
        table.require_inside(layout)
    return make_plan(layout, tables, block_nbytes=block_nbytes)
