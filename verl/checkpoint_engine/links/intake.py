"""How a rollout node fills its slot: whole from the owners, through other nodes, or from deltas."""

from __future__ import annotations

import threading
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from ..errors import TransportError
from ..memory.arena import NodeArena
from ..memory.delta import is_warm
from ..memory.digest import Manifest, PieceDigests
from ..memory.slot import SlotView
from ..plan.delta_choice import Staging
from ..plan.layout import align
from ..plan.sync_plan import SyncPlan
from ..plan.types import Range
from .copying import CopyingReader, Step
from .deltas import NodeDeltas, buckets_of, fitting, reader_of
from .fetch import Bucket, FetchLoop, RangeReader, bounce_nbytes, messages_of, pieces_again, run_together
from .holder import NodeHolder
from .stamps import Stamp, Stamps, raise_if_changed, read_stamps
from .traffic import Traffic
from .upstream import publication_of
from .wire import OwnerAddress, UInt8s, Wire, WireReader
from .wires import Wires


@dataclass(kw_only=True)
class Intake:
    """A node's receiving end for one plan. The backend sets owners, buckets and holder; `receive` fetches versions.

    Used from the thread of the node's engine. A failure abandons its wires; `prepare` then makes another Intake.
    """

    node: str
    """The member's name, as `node-0`."""
    plan: SyncPlan
    arena: NodeArena
    wires: Wires
    stop: threading.Event
    """Another thread sets it to end every wait."""
    most_nbytes: int
    """The most bytes of a bucket, or of a part that nodes forward: the same on every node."""
    max_in_flight: int
    digests: bool
    """Whether to digest pieces as they arrive."""
    owners: dict[int, OwnerAddress] = field(default_factory=dict)
    """The connected owners, by index."""
    buckets: list[Bucket] = field(default_factory=list)
    bounce: UInt8s = field(default_factory=lambda: np.zeros(0, np.uint8))
    """Receives scattered buckets and, behind them, the owners' stamps."""
    steps: dict[tuple[int, int], list[Step]] = field(default_factory=dict)
    """The steps of the buckets, if the wire copies."""
    deltas: NodeDeltas | None = None
    """Memory for the owners' deltas; None if the backend moves none."""
    holder: NodeHolder | None = None
    """Set if nodes forward versions."""

    staging: Staging = field(default_factory=Staging, init=False)
    """How the last version was staged, if deltas were offered."""
    traffic: list[Traffic] = field(default_factory=list, init=False)
    """The traffic of the last version, one per fetch loop."""
    arrived: tuple[int, PieceDigests] | None = field(default=None, init=False)
    """The last received version, and the digests of pieces that were digested on arrival."""

    def messages(self, nbytes: int) -> list[Bucket]:
        """All pieces of all owners, in buckets of at most `nbytes`."""
        return [part for owner in range(self.plan.num_owners) for part in messages_of(self.plan, owner, nbytes)]

    def expect(self, buckets: list[Bucket]) -> None:
        """Set the buckets that this node fetches from owners, and allocate the bounce buffer for them."""
        self.buckets = buckets
        self.bounce = np.zeros(align(bounce_nbytes(buckets)) + self.plan.num_owners * Stamp.NBYTES, np.uint8)

    def receive(self, version: int, deadline: float) -> int:
        """Fill the open slot with `version`; return the bytes fetched. Raises TransportError.

        `deadline` is in seconds of `time.monotonic`, here and below.
        """
        first = self._connected(version, "stage")
        self.arrived = (version, PieceDigests.none_of(len(self.plan))) if self.digests else None
        self.staging, self.traffic = Staging(), []
        try:
            reader = WireReader(first, self.owners, self.wires.slot(self.arena), self.bounce, version)
            before = self._stamps(reader, deadline)
            nbytes = self._fetch(reader, before, deadline)
            raise_if_changed(reader, before, self._stamps(reader, deadline))
        except BaseException:
            self.abandon()
            raise
        if not first.keeps:
            self.wires.deregister_slots()
        return nbytes

    def repair(self, version: int, pieces: Sequence[int], deadline: float) -> None:
        """Read `pieces` again from their owners, also those that another node forwarded. Raises TransportError."""
        first = self._connected(version, "verify")
        try:
            reader = WireReader(first, self.owners, self.wires.slot(self.arena), self.bounce, version)
            before = self._stamps(reader, deadline)
            self._fetch_directly(reader, pieces_again(self.plan, pieces), deadline)
            raise_if_changed(reader, before, self._stamps(reader, deadline))
        except BaseException:
            self.abandon()
            raise
        if self.arrived is not None:
            self.arrived[1].known[list(pieces)] = False
        if not first.keeps:
            self.wires.deregister_slots()

    def abandon(self) -> None:
        self.wires.abandon()
        self.arrived = None
        self.owners.clear()

    def _connected(self, version: int, phase: str) -> Wire:
        if self.wires.first is None:
            raise TransportError("not connected", version=version, phase=phase, member=self.node)
        return self.wires.first

    def _stamps(self, reader: WireReader, deadline: float) -> Stamps:
        begin = len(self.bounce) - len(self.owners) * Stamp.NBYTES
        return read_stamps(reader, self.bounce[begin:], deadline, self._raise_if_stopped)

    def _raise_if_stopped(self, version: int) -> None:
        if self.stop.is_set():
            raise TransportError("given up by the manager", version=version, phase="stage", member=self.node)

    # ------------------------------------------------------------------ whole, or what changed

    def _fetch(self, reader: WireReader, stamps: Stamps, deadline: float) -> int:
        bases = {owner: int(words[3]) for owner, words in zip(self.owners, stamps, strict=True) if words[4]}
        places = self._places_of_deltas(stamps)
        base = self.arena.base() if places and is_warm() else None
        fit = fitting(base[0], bases) if base is not None else set()
        # Nodes that pass something on agree on what: on what all stamps say, whatever they hold themselves.
        wanted = fit if self.holder is None else places.keys() if len(places) == len(self.owners) else ()
        if wanted:
            places = {owner: place for owner, place in places.items() if owner in wanted}
            return self._fetch_deltas(reader, stamps, places, fit, base, deadline)
        self.staging = Staging(pieces_whole=len(self.plan) if places else 0)
        return self._fetch_whole(reader, stamps, deadline)

    def _fetch_whole(self, reader: WireReader, stamps: Stamps, deadline: float) -> int:
        if self.holder is not None:
            loop, publication = self._loop(reader, reader, deadline), publication_of(stamps)
            self.holder.fetch(loop, reader, publication, self.buckets, self._served(reader), deadline)
            return self.plan.layout.payload_nbytes
        loops = [self._reading_loop(replace(reader, wire=wire), deadline) for wire in self.wires.open]
        if len(loops) == 1:
            return loops[0].run(self.buckets)
        return run_together(loops, self.buckets)

    def _places_of_deltas(self, stamps: Stamps) -> dict[int, Range]:
        offered = {owner: int(words[4]) for owner, words in zip(self.owners, stamps, strict=True) if words[4]}
        return self.deltas.places(offered) if self.deltas is not None else {}

    def _fetch_deltas(
        self,
        reader: WireReader,
        stamps: Stamps,
        places: Mapping[int, Range],
        fit: Collection[int],
        base: tuple[Manifest, SlotView] | None,
        deadline: float,
    ) -> int:
        """Fetch the deltas at `places`, also those that only other nodes need; make the slot of those that `fit`."""
        assert self.deltas is not None
        assert self.arrived is not None
        start_s = time.perf_counter()
        total = max(place.dst_offset + place.nbytes for place in places.values())
        memory = self.deltas.bytes
        pulls = reader_of(reader, memory)
        loop = self._loop(pulls, pulls, deadline)
        if self.holder is not None:
            cut = self.holder.cut_of(total)
            buckets = buckets_of(places, self.most_nbytes, cut.own) if cut.own is not None else []
            self.holder.fetch(loop, pulls, publication_of(stamps), buckets, memory, deadline, cut)
        else:
            loop.run(buckets_of(places, self.most_nbytes))
        fetched_s = time.perf_counter()
        readable: Collection[int] = ()
        wrong: list[int] = []
        if base is not None:
            mine = {owner: places[owner] for owner in sorted(fit)}
            readable, wrong = self.deltas.apply(mine, base, reader.slot, self.arrived[1], stopped=self.stop.is_set)
            self._raise_if_stopped(reader.version)
        applied_s = time.perf_counter()
        whole = [part for part in self.messages(self.most_nbytes) if part.owner not in readable]
        whole += pieces_again(self.plan, wrong)
        nbytes = sum(place.nbytes for place in places.values()) + sum(bucket.nbytes for bucket in whole)
        self._fetch_directly(reader, whole, deadline)
        self.staging = Staging(
            fetch_s=fetched_s - start_s,
            apply_s=applied_s - fetched_s,
            pieces_whole=len(wrong) + sum(len(self.plan.pieces_of(owner)) for owner in self.owners.keys() - readable),
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

    # ------------------------------------------------------------------ one loop of it

    def _served(self, reader: WireReader) -> UInt8s:
        """The open slot as the next node may see it: read-only, so that nobody writes into it through this process.

        Network devices write past page tables, and do not register memory that is read-only.
        """
        return reader.slot if reader.wire.keeps else self.arena.slot_view().bytes.numpy()

    def _reading_loop(self, pulls: WireReader, deadline: float) -> FetchLoop:
        if not pulls.wire.copies or self.arrived is None:
            return self._loop(pulls, pulls, deadline)
        reader = CopyingReader(pulls, self.plan, self.steps, self.arrived[1])
        return replace(self._loop(reader, pulls, deadline), on_bucket=reader.digest_scattered)

    def _loop(self, reader: RangeReader, pulls: WireReader, deadline: float) -> FetchLoop:
        self.traffic.append(Traffic())
        return FetchLoop(
            reader=reader,
            plan=self.plan,
            region=pulls.slot,
            bounce=self.bounce,
            version=pulls.version,
            timeout_s=deadline - time.monotonic(),
            stop=self.stop,
            max_in_flight=self.max_in_flight,
            traffic=self.traffic[-1],
        )
