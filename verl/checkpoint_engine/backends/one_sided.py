"""The base of one-sided backends: trainer ranks expose memory, rollout nodes read it at any time.

    prepare             rank: a packed region and a stamp, registered once; node: buckets and a bounce buffer
    init_process_group  node: connect to every owner, register the slots
    send_weights        rank: stamp "writing", copy the pieces into the region, stamp the version
    receive_weights     node: read the stamps, fetch, read the stamps again

A library is wrapped as a `Wire`, which reads one run of bytes at a time and has no notion of versions.
"""

from __future__ import annotations

import time
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import ClassVar

import msgspec

from ..checkpoint_engine import Capabilities, CheckpointEngineWithCache
from ..config import CheckpointEngineConfig
from ..errors import TransportError
from ..links.copying import bucket_nbytes_for, steps_of
from ..links.cuts import UPSTREAM, part_nbytes_for
from ..links.deltas import NodeDeltas
from ..links.fetch import (
    spread_over_bounce,
)
from ..links.holder import IN_FLIGHT, NodeHolder
from ..links.intake import Intake
from ..links.stamps import Exposed
from ..links.traffic import links_of
from ..links.wire import OwnerAddress, Wire
from ..links.wires import Wires
from ..memory.arena import NodeArena
from ..memory.delta import begin_to_warm_up, warm_up
from ..memory.digest import PieceDigests
from ..memory.publishing import Publication
from ..memory.threads import memory_threads
from ..plan.delta_choice import DeltaRequest, Encoded, Staging
from ..plan.encoded import parsed
from ..plan.member_report import Link
from ..plan.sync_plan import SyncPlan
from ..plan.topology import Topology, direct
from ..plan.types import Member
from ..ports import WeightSource
from ..support.admission import NOBODY, OWN_USER, Admission

CLOSING_S = 2.0
"""A node's deadline precedes the manager's by this much: its error names the owners, and closing a wire takes time."""


class OneSidedEngine(CheckpointEngineWithCache):
    """A backend over a `Wire`. A failure closes the wire; the manager then prepares and connects all members again."""

    capabilities = Capabilities(
        one_sided=True,
        same_host=False,
        device_types=("cpu", "cuda", "npu"),
        late_nodes=True,
        topologies=("direct", "chain", "tree", "p2p_broadcast"),
        deltas=True,
    )
    transfer_nbytes: ClassVar[int] = 64 * 2**20
    """The most bytes per transfer, even for larger buckets: failures are noticed between transfers."""
    max_in_flight: ClassVar[int] = 4

    def __init__(self, *, member: Member, config: CheckpointEngineConfig) -> None:
        super().__init__(member=member, config=config)
        self._wires = Wires()
        self._plan: SyncPlan | None = None
        self._encoded_plan = b""
        self._address = ""
        self._exposed: Exposed | None = None
        """Set on trainer ranks."""
        self._request: DeltaRequest | None = None
        self._intake: Intake | None = None
        """Set on nodes."""

    @abstractmethod
    def open_wire(self, topology: Topology | None) -> Wire:
        """Open an endpoint that is read (`topology` None) or that reads. Raises TransportError, ConfigError."""

    def admission_of(self, topology: Topology | None) -> Admission:
        """The peers that may connect to a wire opened with `topology`: none if the wire only reads."""
        return OWN_USER if topology is None else NOBODY

    def num_readers(self, wire: Wire) -> int:
        """The number of threads with which a node reads from owners, each over its own wire like `wire`."""
        return memory_threads() if wire.copies else 1

    @classmethod
    def build_topology(cls, trainers: Sequence[Member], nodes: Sequence[Member]) -> Topology:
        return direct(trainers, nodes)

    def prepare(self, plan: SyncPlan, arena: NodeArena | None) -> str:
        encoded = plan.encode()
        if arena is None and encoded == self._encoded_plan:
            return self._address  # connecting anew after a failure; nodes may still read what they gave up
        self._release()
        self._encoded_plan = encoded
        self._address = self._expose(plan) if arena is None else self._prepare_node(plan, arena)
        return self._address

    def _prepare_node(self, plan: SyncPlan, arena: NodeArena) -> str:
        """Decide in which buckets bytes arrive; the address under which other nodes reach this one, if they do."""
        intake = self._intake = Intake(
            node=self.member.name,
            plan=plan,
            arena=arena,
            wires=self._wires,
            stop=self._stop,
            most_nbytes=self.most_nbytes,
            max_in_flight=self.max_in_flight,
            digests=self.config.verify,
        )
        if not self.passes_on:
            intake.expect(intake.messages(self.most_nbytes))
            return ""
        nbytes = part_nbytes_for(plan.layout.nbytes, self.most_nbytes)
        intake.holder = NodeHolder(plan, self.open_wire(None), nbytes, in_flight=self.passed_at_once)
        return intake.holder.address

    @property
    def most_nbytes(self) -> int:
        """The most bytes of a bucket, or of a part that nodes forward: the same on every node."""
        return min(self.config.bucket_nbytes, self.transfer_nbytes)

    @property
    def passed_at_once(self) -> int:
        """If nodes forward: the buckets from owners, and as many parts from another node, in flight at once."""
        return IN_FLIGHT

    def bounce_room(self) -> int:
        """If nodes forward: the most bytes of the bounce buffer."""
        return self.passed_at_once * self.most_nbytes

    @property
    def passes_on(self) -> bool:
        """Whether nodes forward versions in the configured topology."""
        asked = self.config.topology
        return (self.capabilities.topologies[0] if asked == "auto" else asked) != "direct"

    @property
    def _moves_deltas(self) -> bool:
        return self.config.delta != "off" and self.config.verify

    def _expose(self, plan: SyncPlan) -> str:
        wire = self.open_wire(None)
        self._wires.open.append(wire)
        self._exposed = Exposed(plan, self.member.index, wire, with_deltas=self._moves_deltas)
        return msgspec.json.encode(self._exposed.address).decode()

    def init_process_group(self, topology: Topology) -> None:
        may_get_deltas = self._moves_deltas and (self.config.delta == "always" or not topology.is_on_one_host)
        if may_get_deltas and self.config.delta == "always":
            warm_up()
        if self._intake is None:
            for wire in self._wires.open:
                wire.admit(Admission(addresses=topology.host_addresses))
        else:
            self._connect(self._intake, topology, may_get_deltas)

    def _connect(self, intake: Intake, topology: Topology, may_get_deltas: bool) -> None:
        timeout_s = _before(self.config.deadlines.prepare_s)
        holder = self._join(intake, topology)
        first = self.open_wire(_read_from(topology, holder))
        self._wires.open.append(first)
        if holder is None:
            self._open_helpers(intake, first, topology)
        self._wires.register(intake.bounce)
        if may_get_deltas:
            if intake.deltas is None:
                intake.deltas = NodeDeltas(intake.plan)
            first.register(intake.deltas.bytes)
        if holder is not None:
            holder.connect(first, timeout_s)
        for trainer in topology.trainers:
            if intake.plan.pieces_of(trainer.index):  # their stamps are read, also by who gets the bytes from a node
                owner = parsed(trainer.address, OwnerAddress, "the address of a trainer rank")
                try:
                    self._wires.connect(trainer.index, owner.wire, timeout_s)
                except TransportError as exc:
                    message = f"{self.member.name} cannot reach it: {exc.message}"
                    raise TransportError(message, phase="prepare", member=trainer.name) from exc
                intake.owners[trainer.index] = owner

    def _join(self, intake: Intake, topology: Topology) -> NodeHolder | None:
        """Take a place among the nodes that pass a version on, unless there is no other."""
        holder = intake.holder
        if holder is None:
            return None
        if topology.is_alone(self.member.name):
            holder.close()
            intake.holder = None
            intake.expect(intake.messages(min(self.most_nbytes, self.bounce_room())))
        else:
            places = self.passed_at_once
            buckets = holder.join(topology, self.member, self.bounce_room() // places)
            intake.expect(spread_over_bounce(buckets, places))
        return intake.holder

    def _open_helpers(self, intake: Intake, wire: Wire, topology: Topology) -> None:
        """Decide which threads read. What they copy they take piece by piece."""
        readers = self.num_readers(wire)
        if wire.copies:
            even = bucket_nbytes_for(intake.plan.layout.payload_nbytes, readers)
            intake.expect(intake.messages(min(self.most_nbytes, even)))
            intake.steps = steps_of(intake.plan, intake.buckets)
        if readers > 1:
            intake.expect(spread_over_bounce(intake.buckets, readers))
        while len(self._wires.open) < readers:
            self._wires.open.append(self.open_wire(topology))

    def send_weights(self, version: int, source: WeightSource, slots: Mapping[str, str]) -> Publication:
        assert self._exposed is not None  # the manager prepares every member before it publishes
        request, self._request = self._request, None
        return self._exposed.publish(version, source, request)

    def offer_deltas(self, request: DeltaRequest | None) -> None:
        self._request = request
        if request is not None:
            begin_to_warm_up()

    def encoded(self, version: int) -> Encoded | None:
        return self._exposed.encoded(version) if self._exposed is not None else None

    def staging(self, version: int) -> Staging:
        begin_to_warm_up()  # somebody asks, so owners were offered deltas
        return self._intake.staging if self._intake is not None else Staging()

    def links(self) -> tuple[Link, ...]:
        if self._intake is None:
            return ()
        before = self._intake.holder.upstream if self._intake.holder is not None else None

        def name_of(peer: int) -> str:
            return before.name if peer == UPSTREAM and before is not None else f"trainer-{peer}"

        return links_of(self.member.name, self._intake.traffic, name_of)

    def receive_weights(self, version: int, arena: NodeArena) -> int:
        assert self._intake is not None
        nbytes = self._intake.receive(version, time.monotonic() + _before(self.config.deadlines.stage_s))
        self.close_abandoned()  # of an earlier stage's wire: its peer may have gone on meanwhile
        return nbytes

    def repair_weights(self, version: int, arena: NodeArena, pieces: Sequence[int]) -> bool:
        assert self._intake is not None
        self._intake.repair(version, pieces, time.monotonic() + _before(self.config.deadlines.verify_s))
        return True

    def digests_on_arrival(self, version: int) -> PieceDigests | None:
        arrived = self._intake.arrived if self._intake is not None else None
        return arrived[1] if arrived is not None and arrived[0] == version else None

    def close_abandoned(self) -> None:
        self._wires.close_abandoned()

    def finalize(self) -> None:
        self._release()
        self._wires.close(CLOSING_S)

    def _release(self) -> None:
        self._wires.abandon()
        self.close_abandoned()
        if self._intake is not None and self._intake.holder is not None:
            self._intake.holder.close()
        self._exposed, self._intake, self._request = None, None, None
        self._encoded_plan, self._address = b"", ""


def _before(deadline_s: float) -> float:
    return deadline_s - min(CLOSING_S, deadline_s / 4)


def _read_from(topology: Topology, holder: NodeHolder | None) -> Topology:
    """`topology` with everybody whom a node reads in place of the trainer ranks."""
    before = holder.upstream if holder is not None else None
    return replace(topology, trainers=(*topology.trainers, *([before] if before else [])))
