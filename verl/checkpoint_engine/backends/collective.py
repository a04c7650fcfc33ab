"""`gloo`, `nccl`, `hccl`: every trainer rank broadcasts the pieces that it owns, or deltas, to all rollout nodes.

    owner r ──> node 0, node 1 ...   one process group per owner, the owner being rank 0, so that all ranks send;
                                     nodes are in the groups of all owners

Owners may send deltas if every node can use them. A wrong delta fails the attempt, because a node cannot fetch a piece
alone; the next attempt moves the whole version.

See `owner_groups.py` for groups, headers and failures.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar

import torch

from ..checkpoint_engine import Capabilities, CheckpointEngineWithCache
from ..config import CheckpointEngineConfig, GlooOptions, HcclOptions, NcclOptions
from ..errors import TransportError
from ..links.communicators import Flight, Hccl, Nccl
from ..links.deltas import NodeDeltas, OwnerDeltas, buckets_of, fitting
from ..links.fetch import Bucket, messages_of
from ..links.gloo_chain import GlooChain
from ..links.network import own_address
from ..links.owner_groups import OWN_SHARE, Broadcasts, Leads, OwnerGroups, bounce_for
from ..links.rendezvous import Deadline
from ..memory.arena import NodeArena
from ..memory.delta import begin_to_warm_up, is_warm, warm_up
from ..memory.digest import PieceDigests
from ..memory.packed import PackedRegion
from ..memory.publishing import Publication, publish
from ..plan.delta_choice import DeltaRequest, Encoded, Staging
from ..plan.sync_plan import SyncPlan
from ..plan.topology import Topology, broadcast
from ..plan.types import Member, Range
from ..ports import WeightSource


class CollectiveEngine(CheckpointEngineWithCache):
    """The base of the three backends, which differ only in their communicator and devices."""

    capabilities = Capabilities(
        one_sided=False,
        same_host=False,
        device_types=("cpu", "cuda", "npu"),
        topologies=("broadcast",),
        deltas=True,
    )
    name: ClassVar[str]
    options_class: ClassVar[type[GlooOptions]]
    communicator_class: ClassVar[Any]
    """Class of the `Communicator`, whose argument are the options."""

    def __init__(self, *, member: Member, config: CheckpointEngineConfig) -> None:
        super().__init__(member=member, config=config)
        self._options = config.options_of(self.name, self.options_class)
        communicator = self.communicator_class(self._options)
        self._groups = OwnerGroups(
            member=member, config=config, options=self._options, communicator=communicator, stop=self._stop
        )
        self._plan: SyncPlan | None = None
        self._region: PackedRegion | None = None
        self._published: int | None = None
        self._owner_deltas: OwnerDeltas | None = None
        self._request: DeltaRequest | None = None
        self._node_deltas: NodeDeltas | None = None
        self._arrived: tuple[int, PieceDigests] | None = None
        """The version that was received last, with the digests of the pieces that were made of deltas."""
        self._staging = Staging()
        self._bounce = torch.empty(0, dtype=torch.uint8)

    def prepare(self, plan: SyncPlan, arena: NodeArena | None) -> str:
        self.finalize()
        self._plan = plan
        sends = self.member.role == "trainer"
        moves_deltas = self.config.delta != "off" and self.config.verify
        owners = [self.member.index] if sends else range(plan.num_owners)
        messages = {owner: messages_of(plan, owner, self._bucket_nbytes) for owner in owners if plan.pieces_of(owner)}
        self._groups.expect(plan, messages)
        if not sends:
            self._bounce = bounce_for(messages)
            self._node_deltas = NodeDeltas(plan) if moves_deltas else None
            return ""
        self._region = PackedRegion(plan, self.member.index)
        if moves_deltas:
            self._owner_deltas = OwnerDeltas(plan, self.member.index, self._region)
        return self._groups.host_store() if self.member.index == 0 else ""

    @property
    def _bucket_nbytes(self) -> int:
        return min(self.config.bucket_nbytes, self._options.bucket_megabytes * 2**20)

    @classmethod
    def check_host(cls, config: CheckpointEngineConfig) -> None:
        own_address(config.options_of(cls.name, cls.options_class).interface)
        cls.communicator_class.require()

    @classmethod
    def build_topology(cls, trainers: Sequence[Member], nodes: Sequence[Member]) -> Topology:
        return broadcast(trainers, nodes)

    def init_process_group(self, topology: Topology) -> None:
        if self.config.delta == "always":
            warm_up()
        self._groups.connect(topology)

    def offer_deltas(self, request: DeltaRequest | None) -> None:
        self._request = request
        if request is not None:
            begin_to_warm_up()

    def encoded(self, version: int) -> Encoded | None:
        return self._owner_deltas.encoded(version) if self._owner_deltas is not None else None

    def takes_deltas(self, base: int, arena: NodeArena) -> bool:
        begin_to_warm_up()
        held = arena.base()
        return is_warm() and held is not None and held[0].version == base

    def staging(self, version: int) -> Staging:
        return self._staging

    def send_weights(self, version: int, source: WeightSource, slots: Mapping[str, str]) -> Publication:
        assert self._plan is not None  # the manager prepares every member before it publishes
        assert self._region is not None
        request, self._request = self._request, None
        self._published = None
        if self._owner_deltas is None:
            publication = publish(source, self._region)
        else:
            publication = self._owner_deltas.publish(version, source, request)
        self._published = version
        return publication

    def serve_weights(self, version: int) -> int:
        if self._published != version:
            message = f"version {version} was requested, but version {self._published} is published"
            raise TransportError(message, version=version, phase="stage")
        deadline = Deadline(self.config.deadlines.stage_s * OWN_SHARE)
        for owner, messages in self._groups.messages.items():
            with self._groups.transfer(version):
                self._send(version, owner, messages, deadline)
        return 0

    def _send(self, version: int, owner: int, messages: Sequence[Bucket], deadline: Deadline) -> None:
        assert self._region is not None
        memory, deltas = self._region.bytes, self._owner_deltas.leads_from if self._owner_deltas is not None else (0, 0)
        if self._owner_deltas is not None and deltas[1]:
            memory = torch.from_numpy(self._owner_deltas.bytes)
            messages = buckets_of({owner: Range(0, 0, deltas[1])}, self._bucket_nbytes)
        parts = [bucket.ranges[0] for bucket in messages]
        flying: deque[Flight] = deque()
        for sent in [
            self._groups.header(version, owner, deltas),
            *(memory[part.src_offset : part.src_offset + part.nbytes] for part in parts),
        ]:
            if len(flying) == self._options.in_flight:
                self._groups.wait({owner: flying.popleft()}, version, deadline)
            flying.append(self._groups.broadcast(owner, sent))
        while flying:
            self._groups.wait({owner: flying.popleft()}, version, deadline)

    def receive_weights(self, version: int, arena: NodeArena) -> int:
        assert self._plan is not None
        deadline = Deadline(self.config.deadlines.stage_s * OWN_SHARE)
        self._arrived, self._staging = None, Staging()
        if not self._groups.messages:
            return 0
        slot = arena.writable_view().bytes
        with self._groups.transfer(version):
            start_s = time.perf_counter()
            places = self._places_of_deltas(self._groups.exchange_headers(version, deadline), version, arena)
            moved = self._receive_deltas(places, version, deadline)
            fetched_s = time.perf_counter()
            whole = {owner: buckets for owner, buckets in self._groups.messages.items() if owner not in places}
            moved += self._receive(slot, whole, version, deadline)
        if places:
            self._apply(places, version, arena, fetch_s=fetched_s - start_s)
        return moved

    def _places_of_deltas(self, said: Mapping[int, Leads], version: int, arena: NodeArena) -> dict[int, Range]:
        """Where the deltas go, of those owners that send some. Raises TransportError if they are of no use here."""
        bases = {owner: base for owner, (base, nbytes) in said.items() if nbytes}
        if not bases:
            return {}
        held = arena.base()
        strange = bases.keys() - (fitting(held[0], bases) if held is not None else set())
        if self._node_deltas is None or strange:
            names = ", ".join(map(self._groups.name_of, sorted(strange)))
            message = f"it does not hold the version from which the deltas of {names} lead"
            raise TransportError(message, version=version, phase="stage", member=self.member.name)
        return self._node_deltas.places({owner: said[owner][1] for owner in bases})

    def _receive_deltas(self, places: Mapping[int, Range], version: int, deadline: Deadline) -> int:
        if not places or self._node_deltas is None:
            return 0
        messages = {owner: buckets_of({owner: place}, self._bucket_nbytes) for owner, place in places.items()}
        return self._receive(torch.from_numpy(self._node_deltas.bytes), messages, version, deadline)

    def _apply(self, places: Mapping[int, Range], version: int, arena: NodeArena, *, fetch_s: float) -> None:
        """Make the pieces of the owners at `places`. Those that do not come out right are for `verify` to find."""
        held = arena.base()
        assert self._plan is not None
        assert self._node_deltas is not None
        assert held is not None  # `places` were given for it
        start_s = time.perf_counter()
        digests = PieceDigests.none_of(len(self._plan))
        slot = arena.writable_view().bytes.numpy()
        self._node_deltas.apply(places, held, slot, digests, stopped=self._stop.is_set)
        if self._stop.is_set():
            raise TransportError("given up by the manager", version=version, phase="stage", member=self.member.name)
        self._arrived = version, digests
        self._staging = Staging(fetch_s=fetch_s, apply_s=time.perf_counter() - start_s)

    def digests_on_arrival(self, version: int) -> PieceDigests | None:
        return self._arrived[1] if self._arrived is not None and self._arrived[0] == version else None

    def _receive(
        self, memory: torch.Tensor, messages: Mapping[int, list[Bucket]], version: int, deadline: Deadline
    ) -> int:
        assert self._plan is not None
        reader = Broadcasts(self._groups, memory, self._bounce, version)
        return self._groups.fetch(reader, self._plan, deadline, messages)

    def finalize(self) -> None:
        self._groups.release()
        self._region, self._owner_deltas, self._node_deltas = None, None, None
        self._published, self._request, self._arrived = None, None, None
        self._bounce = torch.empty(0, dtype=torch.uint8)


class GlooEngine(CollectiveEngine):
    name, options_class, communicator_class = "gloo", GlooOptions, GlooChain


class NcclEngine(CollectiveEngine):
    """Broadcasts over NCCL, between CUDA devices of different members."""

    name, options_class, communicator_class = "nccl", NcclOptions, Nccl
    capabilities = replace(CollectiveEngine.capabilities, device_types=("cuda",))


class HcclEngine(CollectiveEngine):
    """Broadcasts over HCCL, between NPUs of different members."""

    name, options_class, communicator_class = "hccl", HcclOptions, Hccl
    capabilities = replace(CollectiveEngine.capabilities, device_types=("npu",))
