"""What the one-sided backends share: trainer ranks expose memory, rollout nodes read it when they like.

    prepare             rank: a packed region and a stamp, registered once; node: buckets and a bounce buffer
    init_process_group  node: connect to every owner, register the slots
    send_weights        rank: stamp "writing", copy the pieces into the region, stamp the version
    receive_weights     node: read the stamps, fetch, read the stamps again

A library comes in as a `Wire`, which reads one run of bytes at a time and knows nothing of versions.
"""

from __future__ import annotations

import time
from abc import abstractmethod
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import ClassVar

import msgspec
import numpy as np
import numpy.typing as npt

from ..base import Capabilities, CheckpointEngineWithCache
from ..config import CheckpointEngineConfig
from ..errors import TransportError, TransportTimeout
from ..links.copying import CopyingReader, Step, bucket_nbytes_for, steps_of
from ..links.deltas import NodeDeltas, OwnerDeltas, buckets_of, fitting, reader_of
from ..links.fetch import (
    STOPPED_S,
    Bucket,
    FetchLoop,
    RangeReader,
    bounce_nbytes,
    messages_of,
    pieces_again,
    run_together,
    spread_over_bounce,
)
from ..links.holder import (
    IN_FLIGHT,
    UPSTREAM,
    NodeHolder,
    part_nbytes_for,
    publication_of,
)
from ..links.traffic import Traffic, links_of
from ..links.wire import LOOK_S, OwnerAddress, Stamp, UInt8s, Wire, WireReader
from ..memory.arena import NodeArena, SlotView
from ..memory.delta import begin_to_warm_up, is_warm, warm_up
from ..memory.digest import Manifest, PieceDigests
from ..memory.packed import PackedRegion
from ..memory.publishing import Publication, publish
from ..memory.threads import memory_threads
from ..plan.delta_choice import DeltaRequest, Encoded, Staging
from ..plan.encoded import parsed
from ..plan.layout import align
from ..plan.member_report import Link
from ..plan.sync_plan import SyncPlan
from ..plan.topology import Topology, direct
from ..plan.types import Member, Range
from ..ports import WeightSource
from ..support.admission import NOBODY, OWN_USER, Admission

CLOSING_S = 2.0
"""A node gives up this much before the manager does, because it can name the owners; closing a wire takes time, too."""


class OneSidedEngine(CheckpointEngineWithCache):
    """A backend over a `Wire`. After any failure it is closed; the manager prepares and connects everybody anew."""

    capabilities = Capabilities(
        one_sided=True,
        same_host=False,
        device_types=("cpu", "cuda", "npu"),
        late_nodes=True,
        topologies=("direct", "chain", "tree", "p2p_broadcast"),
        deltas=True,
    )
    transfer_nbytes: ClassVar[int] = 64 * 2**20
    """At most this many bytes per transfer, however large the buckets: failures are noticed in between."""
    max_in_flight: ClassVar[int] = 4

    def __init__(self, *, member: Member, config: CheckpointEngineConfig) -> None:
        super().__init__(member=member, config=config)
        self._wire: Wire | None = None
        self._helpers: list[Wire] = []
        """On nodes: further wires, for further threads that read."""
        self._plan: SyncPlan | None = None
        self._encoded_plan = b""
        self._address = ""
        self._region: PackedRegion | None = None
        self._stamp: Stamp | None = None
        self._owner_deltas: OwnerDeltas | None = None
        self._request: DeltaRequest | None = None
        self._node_deltas: NodeDeltas | None = None
        self._staging = Staging()
        self._traffic: list[Traffic] = []
        self._arena: NodeArena | None = None
        self._owners: dict[int, OwnerAddress] = {}
        self._buckets: list[Bucket] = []
        self._bounce: UInt8s = np.zeros(0, np.uint8)
        self._slots: dict[str, UInt8s] = {}
        self._steps: dict[tuple[int, int], list[Step]] = {}
        """Of the buckets, where the wire copies."""
        self._arrived: tuple[int, PieceDigests] | None = None
        """The version that was received last, with the digests of what was digested as it arrived."""
        self._holder: NodeHolder | None = None
        """On nodes that pass a version on."""
        self._abandoned: list[Wire] = []
        """Wires with reads in flight that nobody waits for. What arrives goes to memory that is theirs alone."""

    @abstractmethod
    def open_wire(self, topology: Topology | None) -> Wire:
        """A new endpoint; `topology` is known on nodes, None on trainer ranks. Raises TransportError, ConfigError."""

    def admission_of(self, topology: Topology | None) -> Admission:
        """Of a wire that is opened with `topology`: those with which nodes read let nobody in."""
        return OWN_USER if topology is None else NOBODY

    def num_readers(self, wire: Wire) -> int:
        """How many threads of a node read from the owners, each with a wire such as `wire`."""
        return memory_threads() if wire.copies else 1

    @classmethod
    def build_topology(cls, trainers: Sequence[Member], nodes: Sequence[Member]) -> Topology:
        return direct(trainers, nodes)

    def prepare(self, plan: SyncPlan, arena: NodeArena | None) -> str:
        encoded = plan.encode()
        if arena is None and encoded == self._encoded_plan:
            return self._address  # connecting anew after a failure; nodes may still read what they gave up
        self._release()
        self._plan, self._encoded_plan = plan, encoded
        if arena is None:
            self._address = self._expose(plan)
            return self._address
        self._arena = arena
        return self._prepare_node(plan)

    def _prepare_node(self, plan: SyncPlan) -> str:
        """Decide in which buckets bytes arrive; the address under which other nodes reach this one, if they do."""
        if not self.passes_on:
            self._expect(self._messages(self.most_nbytes))
            return ""
        nbytes = part_nbytes_for(plan.layout.nbytes, self.most_nbytes)
        self._holder = NodeHolder(plan, self.open_wire(None), nbytes, in_flight=self.passed_at_once)
        return self._holder.address

    @property
    def most_nbytes(self) -> int:
        """Of a bucket, or of a part that nodes pass on: the same on every node."""
        return min(self.config.bucket_nbytes, self.transfer_nbytes)

    @property
    def passed_at_once(self) -> int:
        """Buckets from owners, and parts from another node, that are under way where nodes pass a version on."""
        return IN_FLIGHT

    def bounce_room(self) -> int:
        """Most bytes that scattered pieces may take on their way, where nodes pass a version on."""
        return self.passed_at_once * self.most_nbytes

    @property
    def passes_on(self) -> bool:
        """Whether nodes serve other nodes, in the topology that is configured."""
        asked = self.config.topology
        return (self.capabilities.topologies[0] if asked == "auto" else asked) != "direct"

    def _messages(self, nbytes: int) -> list[Bucket]:
        assert self._plan is not None
        return [part for owner in range(self._plan.num_owners) for part in messages_of(self._plan, owner, nbytes)]

    def _expect(self, buckets: list[Bucket]) -> None:
        """Everything that arrives at this node. Stamps land behind what is scattered."""
        assert self._plan is not None
        self._buckets = buckets
        self._bounce = np.zeros(align(bounce_nbytes(buckets)) + self._plan.num_owners * Stamp.NBYTES, np.uint8)

    @property
    def _moves_deltas(self) -> bool:
        return self.config.delta != "off" and self.config.verify

    def _expose(self, plan: SyncPlan) -> str:
        self._region = PackedRegion(plan, self.member.index)
        self._stamp = Stamp()
        self._wire = self.open_wire(None)
        self._wire.register(self._region.bytes.numpy())
        self._wire.register(self._stamp.bytes)
        deltas = 0
        if self._moves_deltas:
            self._owner_deltas = OwnerDeltas(plan, self.member.index, self._region)
            self._wire.register(self._owner_deltas.bytes)
            deltas = self._owner_deltas.bytes.ctypes.data
        address = OwnerAddress(
            self._wire.address(),
            self._stamp.incarnation,
            self._region.address,
            self._stamp.bytes.ctypes.data,
            deltas=deltas,
        )
        return msgspec.json.encode(address).decode()

    def init_process_group(self, topology: Topology) -> None:
        may_get_deltas = self._moves_deltas and (self.config.delta == "always" or not topology.is_on_one_host)
        if may_get_deltas and self.config.delta == "always":
            warm_up()
        if self._arena is None:
            if self._wire is not None:
                self._wire.admit(Admission(addresses=topology.host_addresses))
            return
        if self._holder is not None and topology.is_alone(self.member.name):
            self._holder.close()
            self._holder = None
            self._expect(self._messages(min(self.most_nbytes, self.bounce_room())))
        if self._holder is not None:
            places = self.passed_at_once
            buckets = self._holder.join(topology, self.member, self.bounce_room() // places)
            self._expect(spread_over_bounce(buckets, places))
        self._wire = self.open_wire(self._read_from(topology))
        if self._holder is None:
            self._open_helpers(self._wire, topology)
        self._register_targets(may_get_deltas)
        if self._holder is not None:
            self._holder.connect(self._wire, _before(self.config.deadlines.prepare_s))
        assert self._plan is not None
        for trainer in topology.trainers:
            if self._plan.pieces_of(trainer.index):  # their stamps are read, also by who gets the bytes from a node
                owner = parsed(trainer.address, OwnerAddress, "the address of a trainer rank")
                try:
                    for wire in self._wires:
                        wire.connect(trainer.index, owner.wire, _before(self.config.deadlines.prepare_s))
                except TransportError as exc:
                    message = f"{self.member.name} cannot reach it: {exc.message}"
                    raise TransportError(message, phase="prepare", member=trainer.name) from exc
                self._owners[trainer.index] = owner

    def _register_targets(self, may_get_deltas: bool) -> None:
        """What reads write to, but for slots."""
        assert self._plan is not None
        for wire in self._wires:
            wire.register(self._bounce)
        if may_get_deltas:
            if self._node_deltas is None:
                self._node_deltas = NodeDeltas(self._plan)
            self._wires[0].register(self._node_deltas.bytes)

    def _read_from(self, topology: Topology) -> Topology:
        """`topology` with everybody whom this node reads in place of the trainer ranks."""
        before = self._holder.upstream if self._holder is not None else None
        return replace(topology, trainers=(*topology.trainers, *([before] if before else [])))

    def _open_helpers(self, wire: Wire, topology: Topology) -> None:
        """Decide which threads read. What they copy they take piece by piece."""
        assert self._plan is not None
        readers = self.num_readers(wire)
        if wire.copies:
            even = bucket_nbytes_for(self._plan.layout.payload_nbytes, readers)
            self._expect(self._messages(min(self.most_nbytes, even)))
            self._steps = steps_of(self._plan, self._buckets)
        if readers > 1:
            self._expect(spread_over_bounce(self._buckets, readers))
        while len(self._wires) < readers:
            self._helpers.append(self.open_wire(topology))

    @property
    def _wires(self) -> list[Wire]:
        return [self._wire, *self._helpers] if self._wire is not None else []

    def send_weights(self, version: int, source: WeightSource, slots: Mapping[str, str]) -> Publication:
        assert self._plan is not None  # the manager prepares every member before it publishes
        assert self._region is not None
        assert self._stamp is not None
        request, self._request = self._request, None
        self._stamp.begin()
        if self._owner_deltas is None:
            publication = publish(source, self._region)
            self._stamp.finish(version)
        else:
            publication = self._owner_deltas.publish(version, source, request)
            self._stamp.finish(version, *self._owner_deltas.leads_from)
        return publication

    def offer_deltas(self, request: DeltaRequest | None) -> None:
        self._request = request
        if request is not None:
            begin_to_warm_up()

    def encoded(self, version: int) -> Encoded | None:
        return self._owner_deltas.encoded(version) if self._owner_deltas is not None else None

    def staging(self, version: int) -> Staging:
        begin_to_warm_up()  # somebody asks, so owners were offered deltas
        return self._staging

    def links(self) -> tuple[Link, ...]:
        before = self._holder.upstream if self._holder is not None else None

        def name_of(peer: int) -> str:
            return before.name if peer == UPSTREAM and before is not None else f"trainer-{peer}"

        return links_of(self.member.name, self._traffic, name_of)

    def receive_weights(self, version: int, arena: NodeArena) -> int:
        assert self._plan is not None
        if self._wire is None:
            raise TransportError("not connected", version=version, phase="stage", member=self.member.name)
        deadline = time.monotonic() + _before(self.config.deadlines.stage_s)
        self._arrived = (version, PieceDigests.none_of(len(self._plan))) if self.config.verify else None
        self._staging, self._traffic = Staging(), []
        try:
            reader = WireReader(self._wire, self._owners, self._slot(arena), self._bounce, version)
            before = self._stamps(reader, deadline)
            nbytes = self._fetch(reader, before, deadline)
            self._raise_if_changed(reader, before, self._stamps(reader, deadline))
        except BaseException:
            self._abandon()
            raise
        if not self._wire.keeps:
            self._deregister_slots()
        self.close_abandoned()  # of an earlier stage's wire: its peer may have gone on meanwhile
        return nbytes

    def _fetch(self, reader: WireReader, stamps: npt.NDArray[np.int64], deadline: float) -> int:
        bases = {owner: int(words[3]) for owner, words in zip(self._owners, stamps, strict=True) if words[4]}
        places = self._places_of_deltas(stamps)
        assert self._arena is not None
        assert self._plan is not None
        base = self._arena.base() if places and is_warm() else None
        fit = fitting(base[0], bases) if base is not None else set()
        # Nodes that pass something on agree on what: on what all stamps say, whatever they hold themselves.
        wanted = fit if self._holder is None else places.keys() if len(places) == len(self._owners) else ()
        if wanted:
            places = {owner: place for owner, place in places.items() if owner in wanted}
            return self._fetch_deltas(reader, stamps, places, fit, base, deadline)
        self._staging = Staging(pieces_whole=len(self._plan) if places else 0)
        if self._holder is not None:
            loop, publication = self._loop(reader, reader, deadline), publication_of(stamps)
            self._holder.fetch(loop, reader, publication, self._buckets, self._served(reader), deadline)
            return self._plan.layout.payload_nbytes
        loops = [self._reading_loop(replace(reader, wire=wire), deadline) for wire in self._wires]
        if len(loops) == 1:
            return loops[0].run(self._buckets)
        return run_together(loops, self._buckets)

    def _places_of_deltas(self, stamps: npt.NDArray[np.int64]) -> dict[int, Range]:
        offered = {owner: int(words[4]) for owner, words in zip(self._owners, stamps, strict=True) if words[4]}
        return self._node_deltas.places(offered) if self._node_deltas is not None else {}

    def _fetch_deltas(
        self,
        reader: WireReader,
        stamps: npt.NDArray[np.int64],
        places: Mapping[int, Range],
        fit: Collection[int],
        base: tuple[Manifest, SlotView] | None,
        deadline: float,
    ) -> int:
        """Fetch the deltas at `places`, also those that only other nodes need; make the slot of those that `fit`."""
        assert self._plan is not None
        assert self._node_deltas is not None
        assert self._arrived is not None
        start_s = time.perf_counter()
        total = max(place.dst_offset + place.nbytes for place in places.values())
        memory = self._node_deltas.bytes
        pulls = reader_of(reader, memory)
        loop = self._loop(pulls, pulls, deadline)
        if self._holder is not None:
            cut = self._holder.cut_of(total)
            buckets = buckets_of(places, self.most_nbytes, cut.own) if cut.own is not None else []
            self._holder.fetch(loop, pulls, publication_of(stamps), buckets, memory, deadline, cut)
        else:
            loop.run(buckets_of(places, self.most_nbytes))
        fetched_s = time.perf_counter()
        readable: Collection[int] = ()
        wrong: list[int] = []
        if base is not None:
            mine = {owner: places[owner] for owner in sorted(fit)}
            stopped = self._stop.is_set
            readable, wrong = self._node_deltas.apply(mine, base, reader.slot, self._arrived[1], stopped=stopped)
            self._raise_if_stopped(reader.version)
        applied_s = time.perf_counter()
        whole = [part for part in self._messages(self.most_nbytes) if part.owner not in readable]
        whole += pieces_again(self._plan, wrong)
        nbytes = sum(place.nbytes for place in places.values()) + sum(bucket.nbytes for bucket in whole)
        self._fetch_directly(reader, whole, deadline)
        self._staging = Staging(
            fetch_s=fetched_s - start_s,
            apply_s=applied_s - fetched_s,
            pieces_whole=len(wrong) + sum(len(self._plan.pieces_of(owner)) for owner in self._owners.keys() - readable),
        )
        return nbytes

    def _fetch_directly(self, reader: WireReader, buckets: Sequence[Bucket], deadline: float) -> None:
        """From the owners, whoever the bytes came from before."""
        if not buckets:
            return
        bounce = np.zeros(max(bounce_nbytes(buckets), 1), np.uint8)
        reader.wire.register(bounce)
        reader = replace(reader, bounce=bounce)
        replace(self._loop(reader, reader, deadline), bounce=bounce).run(buckets)
        reader.wire.deregister(bounce)

    def _served(self, reader: WireReader) -> UInt8s:
        """The open slot as the next node may see it: read-only, so that nobody writes into it through this process.

        Network devices write past page tables, and do not register memory that is read-only.
        """
        assert self._arena is not None
        return reader.slot if reader.wire.keeps else self._arena.slot_view().bytes.numpy()

    def _reading_loop(self, pulls: WireReader, deadline: float) -> FetchLoop:
        if not pulls.wire.copies or self._arrived is None:
            return self._loop(pulls, pulls, deadline)
        assert self._plan is not None
        reader = CopyingReader(pulls, self._plan, self._steps, self._arrived[1])
        return replace(self._loop(reader, pulls, deadline), on_bucket=reader.digest_scattered)

    def repair_weights(self, version: int, arena: NodeArena, pieces: Sequence[int]) -> bool:
        """Reads them from their owners, whoever they came from."""
        assert self._plan is not None
        if self._wire is None:
            raise TransportError("not connected", version=version, phase="verify", member=self.member.name)
        deadline = time.monotonic() + _before(self.config.deadlines.verify_s)
        try:
            reader = WireReader(self._wire, self._owners, self._slot(arena), self._bounce, version)
            before = self._stamps(reader, deadline)
            self._fetch_directly(reader, pieces_again(self._plan, pieces), deadline)
            self._raise_if_changed(reader, before, self._stamps(reader, deadline))
        except BaseException:
            self._abandon()
            raise
        if self._arrived is not None:
            self._arrived[1].known[list(pieces)] = False
        if not self._wire.keeps:
            self._deregister_slots()
        return True

    def digests_on_arrival(self, version: int) -> PieceDigests | None:
        if self._arrived is None or self._arrived[0] != version:
            return None
        return self._arrived[1]

    def _loop(self, reader: RangeReader, pulls: WireReader, deadline: float) -> FetchLoop:
        assert self._plan is not None
        self._traffic.append(Traffic())
        return FetchLoop(
            reader=reader,
            plan=self._plan,
            region=pulls.slot,
            bounce=self._bounce,
            version=pulls.version,
            timeout_s=deadline - time.monotonic(),
            stop=self._stop,
            max_in_flight=self.max_in_flight,
            traffic=self._traffic[-1],
        )

    def close_abandoned(self) -> None:
        for wire in [wire for wire in self._abandoned if wire.is_idle()]:
            self._abandoned.remove(wire)
            wire.close()

    def finalize(self) -> None:
        self._release()
        deadline = time.monotonic() + CLOSING_S
        while self._abandoned and time.monotonic() < deadline:
            self.close_abandoned()
            time.sleep(LOOK_S)
        for wire in self._abandoned:
            wire.close()
        self._abandoned.clear()

    def _release(self) -> None:
        self._abandon()
        self.close_abandoned()
        if self._holder is not None:
            self._holder.close()
            self._holder = None
        self._region, self._stamp, self._arena, self._plan = None, None, None, None
        self._owner_deltas, self._node_deltas, self._request = None, None, None
        self._encoded_plan, self._address = b"", ""
        self._buckets, self._bounce, self._steps = [], np.zeros(0, np.uint8), {}

    def _abandon(self) -> None:
        """The arena replaces a slot that failed, so a late write of an abandoned wire meets no slot in use."""
        self._abandoned += self._wires
        self._wire, self._arrived = None, None
        self._helpers.clear()
        self._slots.clear()
        self._owners.clear()

    def _slot(self, arena: NodeArena) -> UInt8s:
        """The open slot, registered once per slot file. Files that were replaced are let go."""
        view = arena.writable_view()
        self._deregister_slots({path for path in self._slots if (arena.directory / path).exists()})
        if view.path.name not in self._slots:
            memory = view.bytes.numpy()
            for wire in self._wires:
                wire.register(memory)
            self._slots[view.path.name] = memory
        return self._slots[view.path.name]

    def _deregister_slots(self, but: Collection[str] = ()) -> None:
        for path in [path for path in self._slots if path not in but]:
            gone = self._slots.pop(path)
            for wire in self._wires:
                wire.deregister(gone)

    def _stamps(self, reader: WireReader, deadline: float) -> npt.NDArray[np.int64]:
        """One row per owner. Raises TransportError naming an owner whose region does not hold the version."""
        begin = len(self._bounce) - len(self._owners) * Stamp.NBYTES
        target = self._bounce[begin:]
        waiting = {
            owner: reader.read(owner, address.stamp, target.ctypes.data + position * Stamp.NBYTES, Stamp.NBYTES)
            for position, (owner, address) in enumerate(self._owners.items())
        }
        while waiting:
            waiting = {owner: transfer for owner, transfer in waiting.items() if not reader.is_done(transfer)}
            self._raise_if_stopped(reader.version)
            if waiting and time.monotonic() > deadline:
                names = ", ".join(f"trainer-{owner}" for owner in sorted(waiting))
                raise TransportTimeout(f"{names} cannot be read", version=reader.version, phase="stage")
            if waiting:
                reader.wait(STOPPED_S)
        stamps = np.frombuffer(target.tobytes(), np.int64).reshape(-1, Stamp.WORDS)
        for (owner, address), (incarnation, _, version, *_) in zip(self._owners.items(), stamps.tolist(), strict=True):
            if (incarnation, version) != (address.incarnation, reader.version):
                raise TransportError(
                    _what_is_there(incarnation == address.incarnation, version),
                    version=reader.version,
                    phase="stage",
                    member=f"trainer-{owner}",
                )
        return stamps

    def _raise_if_changed(
        self, reader: WireReader, before: npt.NDArray[np.int64], after: npt.NDArray[np.int64]
    ) -> None:
        for owner, changed in zip(self._owners, (before != after).any(axis=1).tolist(), strict=True):
            if changed:
                message = "it published again while it was read"
                raise TransportError(message, version=reader.version, phase="stage", member=f"trainer-{owner}")

    def _raise_if_stopped(self, version: int) -> None:
        if self._stop.is_set():
            raise TransportError("given up by the manager", version=version, phase="stage", member=self.member.name)


def _before(deadline_s: float) -> float:
    return deadline_s - min(CLOSING_S, deadline_s / 4)


def _what_is_there(same_owner: bool, version: int) -> str:
    if not same_owner:
        return "another process answers at its address"
    return "it is publishing" if version == Stamp.WRITING else f"it holds version {version}"
