"""`kimi_ckpt_engine`: designated rollout nodes pull from the owners, and pass what they pulled on to the other nodes.

    owners ══ P2P reads ══> receivers ── one process group each ──> all other nodes

Every byte leaves its owner once, however many nodes there are. Publishing is that of every one-sided backend: a packed
region and a stamp per rank, registered with Mooncake. A receiver pulls a bucket straight into its open slot (scattered
pieces: into its bounce buffer) and broadcasts it from there, while it pulls the next ones. A single node only pulls.

All nodes compute the same list of buckets, with a receiver each, from the plan and the topology; nobody sends it. They
go through it in the same order, so that nodes which wait for each other's broadcasts never wait in a circle.

What keeps versions apart: a receiver reads the stamps of the owners it pulls from, before and after. Nodes that only
receive are told version and layout by the header of each group, which a receiver sends after its first look at the
stamps; if its second look fails, the whole stage does.
"""

from __future__ import annotations

import socket
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
import torch

from verl import envs
from verl.checkpoint_engine.backends.addresses import own_address, reached_at
from verl.checkpoint_engine.backends.communicators import Flight
from verl.checkpoint_engine.backends.gloo_chain import GlooChain
from verl.checkpoint_engine.backends.mooncake import MooncakeWire
from verl.checkpoint_engine.backends.one_sided import OneSidedEngine
from verl.checkpoint_engine.backends.owner_groups import Broadcasts, OwnerGroups
from verl.checkpoint_engine.backends.rendezvous import Deadline
from verl.checkpoint_engine.backends.wires import OwnerAddress, UInt8s, Wire, WireReader
from verl.checkpoint_engine.base import Capabilities
from verl.checkpoint_engine.config import CheckpointEngineConfig, GlooOptions, KimiCkptEngineOptions
from verl.checkpoint_engine.encoded import parsed
from verl.checkpoint_engine.errors import ConfigError, TransportError
from verl.checkpoint_engine.parameter_server.assignment import assign_receiver_ranks
from verl.checkpoint_engine.parameter_server.host_memory import free_host_nbytes
from verl.checkpoint_engine.parameter_server.rdma import (
    INFINIBAND,
    get_my_rdma_device,
    get_rdma_devices,
    list_ib_devices,
)
from verl.checkpoint_engine.pipeline import Bucket, FetchLoop, RangeReader, messages_of, spread_over_bounce
from verl.checkpoint_engine.plan import SyncPlan
from verl.checkpoint_engine.topology import MAX_LANES, Topology, p2p_broadcast
from verl.checkpoint_engine.types import Member, Range
from verl.utils import config as strict

NAME = "kimi_ckpt_engine"
PLACES_PER_RECEIVER = 2
"""In the bounce buffer: one bucket is passed on while the next one is pulled."""


class NodeAddress(msgspec.Struct, frozen=True):
    """What a node's `Member.address` holds, as JSON."""

    store: str
    """Where nodes meet, if this one is the first of them."""
    bounce_nbytes: int
    """Memory that its bounce buffer may take."""


class KimiCkptEngine(OneSidedEngine):
    capabilities = Capabilities(
        staged=True,
        one_sided=True,
        elastic=False,
        same_host=False,
        device_types=("cpu", "cuda", "npu"),
        late_nodes=True,
        topologies=("p2p_broadcast",),
    )

    def __init__(self, *, member: Member, config: CheckpointEngineConfig) -> None:
        super().__init__(member=member, config=config)
        self._options = _options_of(config)
        self._topology: Topology | None = None
        self._receiver_of: dict[tuple[int, int], int] = {}
        """Of each bucket, known by its owner and its place in the owner's region: the index of a node."""
        self._groups: OwnerGroups | None = None
        """On nodes, if there are several. The "owners" of these groups are receivers."""
        self._meetings = 0
        self._in_flight = 1
        """Buckets of all receivers together."""

    @classmethod
    def check_host(cls, config: CheckpointEngineConfig) -> None:
        options = _options_of(config)
        own_address(options.interface)
        reached_at(options.host, options.interface)
        _rdma_devices(options)

    def open_wire(self, topology: Topology | None) -> Wire:
        if topology is not None and not self._owners_to_read():
            return NoWire()
        options = self._options
        return MooncakeWire(
            host=reached_at(options.host, options.interface),
            protocol=options.p2p_protocol,
            devices=_rdma_devices(options, is_rank=self.member.role == "trainer"),
            admission=self.admission_of(topology),
        )

    @classmethod
    def build_topology(cls, trainers: Sequence[Member], nodes: Sequence[Member]) -> Topology:
        return p2p_broadcast(trainers, nodes, _devices_of(trainers))

    # --- before the first sync ----------------------------------------------------------------------------------------

    def _expose(self, plan: SyncPlan) -> str:
        address = parsed(super()._expose(plan), OwnerAddress, "the address of a member")
        device = _rdma_devices(self._options, is_rank=True)
        return msgspec.json.encode(msgspec.structs.replace(address, device=device)).decode()

    def _prepare_node(self, plan: SyncPlan) -> str:
        """Every node opens a place to meet: which one is the first is only known with the topology."""
        options = self._options
        gloo = GlooOptions(in_flight=options.in_flight, interface=options.interface)
        self._groups = OwnerGroups(
            member=self.member,
            config=self.config,
            options=gloo,
            communicator=GlooChain(gloo),
            stop=self._stop,
            role="node",
        )
        allowed = int(free_host_nbytes() * options.mem_fraction)
        if allowed < self.config.block_nbytes:
            raise ConfigError(
                f"checkpoint_engine.engine_kwargs.{NAME}.mem_fraction={options.mem_fraction} of the free memory of "
                f"{socket.gethostname()} is {allowed} bytes, less than one piece ({self.config.block_nbytes} bytes)",
                phase="prepare",
                member=self.member.name,
            )
        return msgspec.json.encode(NodeAddress(self._groups.host_store(), allowed)).decode()

    def init_process_group(self, topology: Topology) -> None:
        if self._arena is None:
            super().init_process_group(topology)
            return
        assert self._groups is not None
        self._topology = topology
        if len(topology.nodes) == 1:
            self._groups.release()
            self._groups = None
        elif topology.nodes[0].name != self.member.name:
            self._groups.close_store()
        messages = self._share_out(topology)
        super().init_process_group(topology)
        if self._groups is not None:
            assert self._plan is not None
            self._groups.expect(self._plan, messages)
            self._groups.connect(self._meeting())

    def _share_out(self, topology: Topology) -> dict[int, list[Bucket]]:
        """Decide what arrives in which bucket and who pulls it; the buckets of each receiver."""
        assert self._plan is not None
        plan, options = self._plan, self._options
        trainers = {trainer.name: trainer.index for trainer in topology.trainers}
        receivers = topology.audience[topology.trainers[0].name]
        indices = {node.name: node.index for node in topology.nodes}
        allowed = min(
            parsed(node.address, NodeAddress, "the address of a member").bounce_nbytes for node in topology.nodes
        )
        places = PLACES_PER_RECEIVER * min(len(receivers), MAX_LANES)
        places = max(min(places, allowed // self.config.block_nbytes), 1)
        nbytes = min(self.config.bucket_nbytes, options.bucket_size_megabytes * 2**20, allowed // places)
        buckets = [part for owner in range(plan.num_owners) for part in messages_of(plan, owner, nbytes)]
        senders: dict[str, set[int]] = {}
        for name, device in _devices_of(topology.trainers).items():
            senders.setdefault(device, set()).add(trainers[name])
        assigned = assign_receiver_ranks(
            [(bucket.owner, bucket) for bucket in buckets], {name: {indices[name]} for name in receivers}, senders
        )
        self._expect(spread_over_bounce([bucket for _, _, bucket in assigned], places))
        self._receiver_of.clear()
        messages: dict[int, list[Bucket]] = {}
        for (receiver, _, _), bucket in zip(assigned, self._buckets, strict=True):
            self._receiver_of[bucket.owner, bucket.ranges[0].src_offset] = receiver
            messages.setdefault(receiver, []).append(bucket)
        self._in_flight = options.in_flight * min(len(receivers), MAX_LANES)
        return messages

    def _owners_to_read(self) -> set[int]:
        own = self.member.index
        return {owner for (owner, _), receiver in self._receiver_of.items() if receiver == own}

    def _meeting(self) -> Topology:
        """Of all nodes, for the groups of the receivers, at a place that was not used before."""
        assert self._topology is not None
        first, *others = self._topology.nodes
        store = parsed(first.address, NodeAddress, "the address of a member").store
        self._meetings += 1
        names = {node.name for node in self._topology.nodes}
        audience = {name: to for name, to in self._topology.audience.items() if name in names}
        return Topology((replace(first, address=f"{store}-{self._meetings}"), *others), (), audience)

    # --- a sync -------------------------------------------------------------------------------------------------------

    def _fetch(self, reader: WireReader, stamps: npt.NDArray[np.int64], deadline: float) -> int:
        if self._groups is None or not self._buckets:
            return self._loop(reader, reader, deadline).run(self._buckets)
        if self._options.rebuild_group and not self._groups.is_connected:
            self._groups.connect(self._meeting(), deadline - time.monotonic())
        with self._groups.transfer(reader.version):
            self._groups.exchange_headers(reader.version, Deadline(deadline - time.monotonic()))
            slot, bounce = torch.from_numpy(reader.slot), torch.from_numpy(self._bounce)
            broadcasts = Broadcasts(self._groups, slot, bounce, reader.version)
            relay = Relay(reader, broadcasts, self.member.index, self._receiver_of)
            nbytes = self._loop(relay, reader, deadline).run(self._buckets)
        if self._options.rebuild_group:
            self._groups.leave_together(self._meeting(), deadline - time.monotonic())
        return nbytes

    def _loop(self, reader: RangeReader, pulls: WireReader, deadline: float) -> FetchLoop:
        return replace(super()._loop(reader, pulls, deadline), interleave=False, max_in_flight=self._in_flight)

    def _release(self) -> None:
        super()._release()
        if self._groups is not None:
            self._groups.release()
            self._groups = None
        self._topology = None
        self._receiver_of.clear()
        self._meetings = 0


@dataclass
class _Passing:
    """A bucket that this node pulls and then passes on."""

    pull: Any
    target: Range
    bounce: bool
    arrived: bool = False
    broadcast: tuple[int, Flight] | None = None


@dataclass
class Relay:
    """The `RangeReader` of a node among several: its own buckets through the wire and on, those of others from them."""

    wire: WireReader
    broadcasts: Broadcasts
    node: int
    receiver_of: Mapping[tuple[int, int], int]
    _passing: deque[_Passing] = field(default_factory=deque)
    """Pulled, or on their way here, in the order in which the other nodes expect them."""

    def start(self, owner: int, ranges: Sequence[Range], *, bounce: bool) -> _Passing | tuple[int, Flight]:
        (part,) = ranges
        receiver = self.receiver_of[owner, part.src_offset]
        if receiver != self.node:
            return self.broadcasts.start(receiver, ranges, bounce=bounce)
        passing = _Passing(self.wire.start(owner, ranges, bounce=bounce), part, bounce)
        self._passing.append(passing)
        return passing

    def is_done(self, transfer: _Passing | tuple[int, Flight]) -> bool:
        if not isinstance(transfer, _Passing):
            return self.broadcasts.is_done(transfer)
        if not transfer.arrived:
            transfer.arrived = self.wire.is_done(transfer.pull)
            while self._passing and self._passing[0].arrived:
                first = self._passing.popleft()
                first.broadcast = self.broadcasts.start(self.node, (first.target,), bounce=first.bounce)
        return transfer.broadcast is not None and self.broadcasts.is_done(transfer.broadcast)

    def wait(self, timeout_s: float) -> None:
        self.broadcasts.wait(timeout_s)

    def cancel(self, transfer: _Passing | tuple[int, Flight]) -> None:
        """Wire and groups are given up after every failure; that ends this transfer with all others."""


class NoWire(Wire):
    """The endpoint of a node that pulls nothing: its slots need not be registered with a network device."""

    def register(self, memory: UInt8s) -> None:
        """Nobody reads it."""

    def deregister(self, memory: UInt8s) -> None:
        """It never was registered."""

    def address(self) -> bytes:
        return b""

    def connect(self, owner: int, address: bytes, timeout_s: float) -> None:
        raise TransportError(f"this node pulls nothing, also not from trainer-{owner}")

    def read(self, owner: int, source: int, target: int, nbytes: int) -> Any:
        raise TransportError(f"this node pulls nothing, also not from trainer-{owner}")

    def is_done(self, transfer: Any) -> bool:
        raise TransportError("this node pulls nothing")

    def close(self) -> None:
        """There is nothing to end."""


def _options_of(config: CheckpointEngineConfig) -> KimiCkptEngineOptions:
    given = config.engine_kwargs.get(NAME, {})
    return strict.from_mapping(KimiCkptEngineOptions, given, f"checkpoint_engine.engine_kwargs.{NAME}")


def _devices_of(trainers: Sequence[Member]) -> dict[str, str]:
    """The network device of each trainer rank, by the rank's name. With TCP each counts as one of its own."""
    devices = {}
    for trainer in trainers:
        device = parsed(trainer.address, OwnerAddress, "the address of a member").device
        devices[trainer.name] = f"{trainer.host}/{device or trainer.name}"
    return devices


def _rdma_devices(options: KimiCkptEngineOptions, *, is_rank: bool = False, present_in: Path = INFINIBAND) -> str:
    """Devices for Mooncake, comma-separated; none with TCP. A node's one member uses all, a rank the one that is its.

    Raises ConfigError if they are not there, or cannot be divided among the ranks of this host.
    """
    if options.p2p_protocol != "rdma":
        return ""
    present = list_ib_devices(present_in)
    devices = [name.strip() for name in options.rdma_devices.split(",") if name.strip()] or get_rdma_devices(present_in)
    if (missing := [name for name in devices if name not in present]) or not present:
        raise ConfigError(
            f"checkpoint_engine.engine_kwargs.{NAME}: no RDMA device {', '.join(missing) or 'at all'} on "
            f"{socket.gethostname()}; there are: {', '.join(present) or 'none'}. Use p2p_protocol=tcp without RDMA "
            "hardware"
        )
    if options.rdma_devices or not is_rank:
        return ",".join(devices)
    local_rank, local_world_size = envs.place_on_host()
    try:
        return get_my_rdma_device(local_rank, local_world_size, devices)
    except ValueError as exc:
        raise ConfigError(f"checkpoint_engine.engine_kwargs.{NAME}.rdma_devices is empty, and {exc}") from exc
