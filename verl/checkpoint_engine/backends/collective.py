"""`gloo`, `nccl`, `hccl`: every trainer rank broadcasts the pieces that it owns to all rollout nodes.

    owner r ──> node 0, node 1 ...   one process group per owner, the owner being rank 0: several senders, no funnel;
                                     nodes sit in the groups of all owners

See `owner_groups.py` for the groups, headers and what a failure leads to.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch

from verl.checkpoint_engine.base import Capabilities, CheckpointEngineWithCache
from verl.checkpoint_engine.config import CheckpointEngineConfig, GlooOptions, HcclOptions, NcclOptions
from verl.checkpoint_engine.errors import TransportError
from verl.checkpoint_engine.links.communicators import Flight, Hccl, Nccl
from verl.checkpoint_engine.links.fetch import Bucket, messages_of
from verl.checkpoint_engine.links.gloo_chain import GlooChain
from verl.checkpoint_engine.links.network import own_address
from verl.checkpoint_engine.links.owner_groups import OWN_SHARE, Broadcasts, OwnerGroups, bounce_for
from verl.checkpoint_engine.links.rendezvous import Deadline
from verl.checkpoint_engine.memory.arena import NodeArena
from verl.checkpoint_engine.memory.packed import PackedRegion
from verl.checkpoint_engine.memory.publishing import Publication, publish
from verl.checkpoint_engine.plan.sync_plan import SyncPlan
from verl.checkpoint_engine.plan.topology import Topology, broadcast
from verl.checkpoint_engine.plan.types import Member
from verl.checkpoint_engine.ports import WeightSource
from verl.utils import config as strict


class CollectiveEngine(CheckpointEngineWithCache):
    """What the three have in common, which is all but the communicator."""

    name: ClassVar[str]
    options_class: ClassVar[type[GlooOptions]]
    communicator_class: ClassVar[type[Any]]

    def __init__(self, *, member: Member, config: CheckpointEngineConfig) -> None:
        super().__init__(member=member, config=config)
        self._options = self._options_of(config)
        communicator = self.communicator_class(self._options)
        self._groups = OwnerGroups(
            member=member, config=config, options=self._options, communicator=communicator, stop=self._stop
        )
        self._plan: SyncPlan | None = None
        self._region: PackedRegion | None = None
        self._published: int | None = None
        self._bounce = torch.empty(0, dtype=torch.uint8)

    def prepare(self, plan: SyncPlan, arena: NodeArena | None) -> str:
        self.finalize()
        self._plan = plan
        sends = self.member.role == "trainer"
        bucket_nbytes = min(self.config.bucket_nbytes, self._options.bucket_megabytes * 2**20)
        owners = [self.member.index] if sends else range(plan.num_owners)
        messages = {owner: messages_of(plan, owner, bucket_nbytes) for owner in owners if plan.pieces_of(owner)}
        self._groups.expect(plan, messages)
        if not sends:
            self._bounce = bounce_for(messages)
            return ""
        self._region = PackedRegion(plan, self.member.index)
        return self._groups.host_store() if self.member.index == 0 else ""

    @classmethod
    def check_host(cls, config: CheckpointEngineConfig) -> None:
        own_address(cls._options_of(config).interface)

    @classmethod
    def _options_of(cls, config: CheckpointEngineConfig) -> GlooOptions:
        given = config.engine_kwargs.get(cls.name, {})
        return strict.from_mapping(cls.options_class, given, f"checkpoint_engine.engine_kwargs.{cls.name}")

    @classmethod
    def build_topology(cls, trainers: Sequence[Member], nodes: Sequence[Member]) -> Topology:
        return broadcast(trainers, nodes)

    def init_process_group(self, topology: Topology) -> None:
        self._groups.connect(topology)

    def send_weights(self, version: int, source: WeightSource, slots: Mapping[str, str]) -> Publication:
        assert self._plan is not None  # the manager prepares every member before it publishes
        assert self._region is not None
        self._published = None
        publication = publish(source, self._region)
        self._published = version
        return publication

    def serve_weights(self, version: int) -> int:
        if self._published != version:
            message = f"asked for version {version}, but version {self._published} is what was published"
            raise TransportError(message, version=version, phase="stage")
        deadline = Deadline(self.config.deadlines.stage_s * OWN_SHARE)
        for owner, messages in self._groups.messages.items():
            with self._groups.transfer(version):
                self._send(version, owner, messages, deadline)
        return 0

    def receive_weights(self, version: int, arena: NodeArena) -> int:
        assert self._plan is not None
        deadline = Deadline(self.config.deadlines.stage_s * OWN_SHARE)
        if not self._groups.messages:
            return 0
        with self._groups.transfer(version):
            self._groups.exchange_headers(version, deadline)
            reader = Broadcasts(self._groups, arena.writable_view().bytes, self._bounce, version)
            return self._groups.fetch(reader, self._plan, deadline)

    def finalize(self) -> None:
        self._groups.release()
        self._region = None
        self._published = None
        self._bounce = torch.empty(0, dtype=torch.uint8)

    def _send(self, version: int, owner: int, messages: Sequence[Bucket], deadline: Deadline) -> None:
        assert self._region is not None
        flying: deque[Flight] = deque()
        memories = [self._groups.header(version, owner)]
        for bucket in messages:
            start = bucket.ranges[0].src_offset
            memories.append(self._region.bytes[start : start + bucket.ranges[0].nbytes])
        for memory in memories:
            if len(flying) == self._options.in_flight:
                self._groups.wait({owner: flying.popleft()}, version, deadline)
            flying.append(self._groups.broadcast(owner, memory))
        while flying:
            self._groups.wait({owner: flying.popleft()}, version, deadline)


class GlooEngine(CollectiveEngine):
    name = "gloo"
    options_class = GlooOptions
    communicator_class = GlooChain
    capabilities = Capabilities(
        one_sided=False,
        same_host=False,
        device_types=("cpu", "cuda", "npu"),
        topologies=("broadcast",),
    )


class NcclEngine(CollectiveEngine):
    """Written to the same contract; it takes two CUDA devices to run it."""

    name = "nccl"
    options_class = NcclOptions
    communicator_class = Nccl
    capabilities = Capabilities(
        one_sided=False,
        same_host=False,
        device_types=("cuda",),
        topologies=("broadcast",),
    )


class HcclEngine(CollectiveEngine):
    """Written to the same contract; it takes two NPUs to run it."""

    name = "hccl"
    options_class = HcclOptions
    communicator_class = Hccl
    capabilities = Capabilities(
        one_sided=False,
        same_host=False,
        device_types=("npu",),
        topologies=("broadcast",),
    )
