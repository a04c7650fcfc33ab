"""`gloo`, `nccl`, `hccl`: every trainer rank broadcasts the pieces that it owns to all rollout nodes.

    owner r ──┬─> node 0      one process group per owner, the owner being rank 0: several senders, no funnel;
              └─> node 1      nodes sit in the groups of all owners

The groups are built straight over a store of their own (hosted by trainer 0, on a free port, under a name that is new
with every `prepare`), so that nothing global of torch.distributed is touched and several engines fit into one process.

Every stage begins with a header broadcast in each group: version, layout and size. A node that is sent anything but the
version which it was asked to stage refuses it before a byte of weights lands. A group whose transfer failed is never
used again, for what is left in its connections cannot be told apart from what comes next: the manager prepares anew.
"""

from __future__ import annotations

import struct
import threading
import time
import uuid
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, ClassVar

import torch
from torch._C._distributed_c10d import PrefixStore, Store, TCPStore

from verl.checkpoint_engine.arena import NodeArena
from verl.checkpoint_engine.backends.addresses import own_address
from verl.checkpoint_engine.backends.communicators import Communicator, Flight, Gloo, Hccl, Nccl
from verl.checkpoint_engine.backends.rendezvous import POLL_S, PULSE_S, QUIET_S, Attempt, Deadline, Members, failures
from verl.checkpoint_engine.base import Capabilities, CheckpointEngineWithCache
from verl.checkpoint_engine.config import CheckpointEngineConfig, GlooOptions, HcclOptions, NcclOptions
from verl.checkpoint_engine.errors import TransportError, TransportTimeout
from verl.checkpoint_engine.packed import PackedRegion
from verl.checkpoint_engine.pipeline import Bucket, FetchLoop, Publication, messages_of, publish
from verl.checkpoint_engine.plan import SyncPlan
from verl.checkpoint_engine.ports import WeightSource
from verl.checkpoint_engine.topology import Topology, broadcast, lane_of
from verl.checkpoint_engine.types import Member, Range
from verl.utils import config as strict

OWN_SHARE = 0.9
"""Of a phase's deadline: the member that waits knows for whom, so its error should come before the manager's."""
HEADER = struct.Struct("<qqq16s")
"""Version, number of messages, bytes of weights, digest of the layout."""


@dataclass
class _Broadcasts:
    """A `RangeReader` over the owners' groups: a message is received where its range belongs."""

    communicator: Communicator
    groups: Mapping[int, Any]
    slot: torch.Tensor
    bounce: torch.Tensor
    version: int

    def start(self, owner: int, ranges: Sequence[Range], *, bounce: bool) -> tuple[int, Flight]:
        (message,) = ranges
        memory = (self.bounce if bounce else self.slot)[message.dst_offset : message.dst_offset + message.nbytes]
        return owner, self.communicator.broadcast(self.groups[owner], memory, sending=False)

    def is_done(self, transfer: tuple[int, Flight]) -> bool:
        owner, flight = transfer
        with failures(f"the broadcast of trainer-{owner}", self.version):
            return flight.is_done()

    def cancel(self, transfer: tuple[int, Flight]) -> None:
        """A broadcast cannot be taken back: it keeps its memory, and the arena gives that slot up."""


class CollectiveEngine(CheckpointEngineWithCache):
    """What the three have in common, which is all but the communicator."""

    name: ClassVar[str]
    options_class: ClassVar[type[GlooOptions]]
    communicator_class: ClassVar[type[Any]]

    def __init__(self, *, member: Member, config: CheckpointEngineConfig) -> None:
        super().__init__(member=member, config=config)
        self._options = self._options_of(config)
        self._communicator: Communicator = self.communicator_class(self._options)
        self._plan: SyncPlan | None = None
        self._region: PackedRegion | None = None
        self._published: int | None = None
        self._messages: dict[int, list[Bucket]] = {}
        self._bounce = torch.empty(0, dtype=torch.uint8)
        self._server: TCPStore | None = None
        self._groups: dict[int, Any] = {}
        self._members: Members | None = None

    def prepare(self, plan: SyncPlan, arena: NodeArena | None) -> str:
        self.finalize()
        self._plan = plan
        sends = self.member.role == "trainer"
        bucket_nbytes = min(self.config.bucket_nbytes, self._options.bucket_megabytes * 2**20)
        owners = [self.member.index] if sends else range(plan.num_owners)
        self._messages = {owner: messages_of(plan, owner, bucket_nbytes) for owner in owners if plan.pieces_of(owner)}
        if not sends:
            bounced = (bucket.ranges[0].nbytes for per in self._messages.values() for bucket in per if bucket.scatter)
            self._bounce = torch.zeros(max(bounced, default=0), dtype=torch.uint8)
            return ""
        self._region = PackedRegion(plan, self.member.index)
        return self._host_store() if self.member.index == 0 else ""

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
        deadline = Deadline(self.config.deadlines.prepare_s * OWN_SHARE)
        names = [member.name for member in (*topology.trainers, *topology.nodes)]
        members = Members(self.member.name, names)

        def connect() -> dict[int, Any]:
            address = topology.trainers[0].address
            with failures(f"connecting to trainer-0 at {address}", None, "prepare"):
                members.join(self._server, address, deadline, self._stop)
                return self._make_groups(members.store, topology)

        # On a thread of its own, because a store does not keep its timeouts when the process that hosts it is stopped.
        connecting = Attempt(connect)
        while not connecting.done.wait(POLL_S):
            if self._stop.is_set() or deadline.passed:
                raise members.not_connected(deadline)
        self._groups = connecting.result()
        self._members = members

    def _make_groups(self, store: Store, topology: Topology) -> dict[int, Any]:
        """One group per owner that has anything to send to this member, or that this member is; all in use once."""
        groups = {}
        for owner in self._messages:
            names = topology.group_of(f"trainer-{owner}")
            own = PrefixStore(f"trainer-{owner}", store)
            rank = names.index(self.member.name)
            lane = lane_of(owner, num_owners=len(topology.trainers), num_nodes=len(topology.nodes))
            groups[owner] = self._communicator.group(own, rank, len(names), lane, self.config.deadlines.stage_s)
        # Connections are made on first use; a stage should find them made.
        sending = self.member.role == "trainer"
        greetings = [
            self._communicator.broadcast(group, torch.zeros(1, dtype=torch.uint8), sending=sending)
            for group in groups.values()
        ]
        while not all(greeting.is_done() for greeting in greetings):
            time.sleep(POLL_S)
        return groups

    def send_weights(self, version: int, source: WeightSource, slots: Mapping[str, str]) -> Publication:
        assert self._plan is not None  # the manager prepares every member before it publishes
        assert self._region is not None
        self._published = None
        publication = publish(source, self._plan, self.member.index, [self._region])
        self._published = version
        return publication

    def serve_weights(self, version: int) -> None:
        if self._published != version:
            message = f"asked for version {version}, but version {self._published} is what was published"
            raise TransportError(message, version=version, phase="stage")
        deadline = Deadline(self.config.deadlines.stage_s * OWN_SHARE)
        for owner, messages in self._messages.items():
            with self._transfer(version):
                self._send(version, owner, messages, deadline)

    def receive_weights(self, version: int, arena: NodeArena) -> int:
        assert self._plan is not None
        deadline = Deadline(self.config.deadlines.stage_s * OWN_SHARE)
        if not self._messages:
            return 0
        with self._transfer(version):
            self._await_headers(version, deadline)
            slot = arena.writable_view().bytes
            loop = FetchLoop(
                reader=_Broadcasts(self._communicator, self._groups, slot, self._bounce, version),
                plan=self._plan,
                region=slot.numpy(),
                bounce=self._bounce.numpy(),
                version=version,
                timeout_s=deadline.remaining_s,
                stop=self._stop,
                max_in_flight=self._communicator.max_in_flight(self._options.in_flight, len(self._messages)),
                poll_s=POLL_S,
            )
            return loop.run([bucket for messages in self._messages.values() for bucket in messages])

    def finalize(self) -> None:
        self._groups.clear()
        self._communicator.release()
        self._members = None
        self._server = None
        self._region = None
        self._published = None
        self._bounce = torch.empty(0, dtype=torch.uint8)

    def _host_store(self) -> str:
        host = own_address(self._options.interface)
        with failures(f"opening a store on any free port of {host}", None, "prepare"):
            timeout = timedelta(seconds=self.config.deadlines.prepare_s)
            self._server = TCPStore(host, 0, is_master=True, timeout=timeout, wait_for_workers=False)
        return f"{host}:{self._server.port}/{uuid.uuid4().hex}"

    @contextmanager
    def _transfer(self, version: int) -> Iterator[None]:
        """Whatever goes wrong inside, the groups are given up."""
        if self._members is None or self._messages.keys() - self._groups.keys():
            raise TransportError("not connected, or no longer after a failure", version=version, phase="stage")
        try:
            with self._members.taking_part(), self._blaming(self._members), failures("a broadcast", version):
                yield
        except BaseException:
            # A group is gone only when its last operation has ended, at the latest after the stage's deadline.
            # Nobody waits for that here.
            given_up, self._groups = self._groups, {}
            threading.Thread(target=given_up.clear, name="weight-sync-given-up", daemon=True).start()
            raise

    @contextmanager
    def _blaming(self, members: Members) -> Iterator[None]:
        """Complete errors of the network with the members that are not there."""
        try:
            yield
        except TransportTimeout as exc:
            exc.message += members.missing()
            raise
        except TransportError as exc:
            # A broken connection tells nothing about who is gone: that shows when its pulse stays away. The manager,
            # which may know, interrupts.
            if isinstance(exc.__cause__, RuntimeError):
                self._stop.wait(QUIET_S + PULSE_S)
                exc.message += members.missing()
            raise

    def _send(self, version: int, owner: int, messages: Sequence[Bucket], deadline: Deadline) -> None:
        assert self._region is not None
        flying: deque[Flight] = deque()
        memories = [self._header(version, owner)]
        for bucket in messages:
            start = bucket.ranges[0].src_offset
            memories.append(self._region.bytes[start : start + bucket.ranges[0].nbytes])
        for memory in memories:
            if len(flying) == self._options.in_flight:
                self._wait({owner: flying.popleft()}, version, deadline)
            flying.append(self._communicator.broadcast(self._groups[owner], memory, sending=True))
        while flying:
            self._wait({owner: flying.popleft()}, version, deadline)

    def _await_headers(self, version: int, deadline: Deadline) -> None:
        """Every owner's header, compared with the one that this node expects. Raises TransportError if they differ."""
        headers = {owner: torch.zeros(HEADER.size, dtype=torch.uint8) for owner in self._messages}
        self._wait(
            {
                owner: self._communicator.broadcast(self._groups[owner], header, sending=False)
                for owner, header in headers.items()
            },
            version,
            deadline,
        )
        for owner, header in headers.items():
            if not torch.equal(header, self._header(version, owner)):
                sent = HEADER.unpack(header.numpy().tobytes())[0]
                what = f"version {sent}" if sent != version else "another layout or other buckets"
                message = f"trainer-{owner} sends {what} where version {version} is expected"
                raise TransportError(message, version=version, phase="stage")

    def _header(self, version: int, owner: int) -> torch.Tensor:
        assert self._plan is not None
        messages = self._messages[owner]
        fields = (version, len(messages), sum(bucket.nbytes for bucket in messages))
        packed = HEADER.pack(*fields, bytes.fromhex(self._plan.layout.digest))
        return torch.frombuffer(bytearray(packed), dtype=torch.uint8)

    def _wait(self, flights: Mapping[int, Flight], version: int, deadline: Deadline) -> None:
        """Until all have landed. `flights` are by owner."""
        waiting = dict(flights)
        while True:
            for owner, flight in list(waiting.items()):
                with failures(f"the broadcast of trainer-{owner}", version):
                    if flight.is_done():
                        del waiting[owner]
            if not waiting:
                return
            if self._stop.is_set():
                raise TransportError("given up by the manager", version=version, phase="stage")
            if deadline.passed:
                owners = ", ".join(f"trainer-{owner}" for owner in waiting)
                message = f"the broadcast of {owners} not done within {deadline.timeout_s:.1f} s"
                raise TransportTimeout(message, version=version, phase="stage")
            time.sleep(POLL_S)


class GlooEngine(CollectiveEngine):
    name = "gloo"
    options_class = GlooOptions
    communicator_class = Gloo
    capabilities = Capabilities(
        staged=True,
        one_sided=False,
        elastic=False,
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
        staged=True,
        one_sided=False,
        elastic=False,
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
        staged=True,
        one_sided=False,
        elastic=False,
        same_host=False,
        device_types=("npu",),
        topologies=("broadcast",),
    )
