"""`topology=chain` for the one-sided backends: node 0 reads from the owners, every other node from the one before it.

    owners --> node 0 --> node 1 --> node 2 ...

A node serves its open slot while it fills. The slot is cut into parts; a page of its own, next to the slot and never
inside it, says which parts are there. The next node reads that page, and then those parts, through the same wire.

What keeps versions apart: every node reads the stamps of all owners, before and after, as without a chain. Their digest
stands in the page, written last. It differs for every publication, also for one of the same version that is tried
again, so a page that shows a node's own digest speaks of the bytes that this node is to have.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
import xxhash

from verl.checkpoint_engine.backends.wires import UInt8s, Wire, WireReader
from verl.checkpoint_engine.encoded import parsed
from verl.checkpoint_engine.errors import TransportError, TransportTimeout
from verl.checkpoint_engine.pipeline import STOPPED_S, Bucket, FetchLoop
from verl.checkpoint_engine.plan import SyncPlan
from verl.checkpoint_engine.shards import Int64s, extents_of
from verl.checkpoint_engine.topology import Topology
from verl.checkpoint_engine.types import Member, Range
from verl.utils.admission import Admission

UPSTREAM = -1
"""Stands for the node before, where a wire or a bucket names an owner."""
POLL_S = 0.001
"""Between two looks at the page of the node before."""
PARTS = 256
"""Into so many is a slot cut, unless they were too small or too large then. A hop delays a version by a few of them."""
LEAST_PART_NBYTES = 2**20
"""A read costs some hundred microseconds beside its bytes, and a part may be seen a millisecond late."""
IN_FLIGHT = 2
"""Parts, or the buckets that fill them. More share the network, and all of them are there later."""


class Endpoint(msgspec.Struct, frozen=True):
    """What a node's `Member.address` holds in a chain, as JSON."""

    wire: bytes
    page: int
    page_nbytes: int


class Page:
    """[publication, address of the slot, bytes of the wire's address], the wire's address, one byte per part.

    A wire's address may change when memory is registered, so it travels in the page, too.
    """

    HEADER = 24
    MAX_ADDRESS = 2**16
    PARTS = HEADER + MAX_ADDRESS
    EMPTY = 0

    def __init__(self, num_parts: int) -> None:
        self.bytes: UInt8s = np.zeros(self.PARTS + num_parts, np.uint8)

    @property
    def words(self) -> Int64s:
        return self.bytes[: self.HEADER].view(np.int64)

    @property
    def parts(self) -> UInt8s:
        return self.bytes[self.PARTS :]

    @property
    def wire(self) -> bytes:
        return self.bytes[self.HEADER : self.HEADER + int(self.words[2])].tobytes()

    def write(self, publication: int, slot: int, wire: bytes, ready: npt.NDArray[np.bool_]) -> None:
        if len(wire) > self.MAX_ADDRESS:
            raise TransportError(f"the address of the wire has {len(wire)} bytes, more than {self.MAX_ADDRESS}")
        self.words[0] = self.EMPTY
        self.parts[:] = ready
        self.bytes[self.HEADER : self.HEADER + len(wire)] = np.frombuffer(wire, np.uint8)
        self.words[1:] = slot, len(wire)
        self.words[0] = publication


def part_nbytes_for(slot_nbytes: int, most_nbytes: int) -> int:
    """How large the parts of a slot are, and the buckets that fill them. Pure."""
    return min(max(-(-slot_nbytes // PARTS), LEAST_PART_NBYTES), most_nbytes)


def publication_of(stamps: Int64s) -> int:
    """A number other than `Page.EMPTY` that is equal exactly where the stamps of all owners are."""
    return (xxhash.xxh3_64_intdigest(stamps.tobytes()) >> 1) | 1


class ChainLink:
    """One node's place in the chain: what it offers to the next node, and from whom it reads."""

    def __init__(self, plan: SyncPlan, wire: Wire, part_nbytes: int) -> None:
        """`wire` answers the next node; it is closed with this."""
        self._plan = plan
        self._part_nbytes = part_nbytes
        self._wire = wire
        starts = range(0, plan.layout.nbytes, part_nbytes)
        sizes = [min(part_nbytes, plan.layout.nbytes - start) for start in starts]
        self.parts = [
            Bucket(UPSTREAM, (Range(start, start, nbytes),), nbytes)
            for start, nbytes in zip(starts, sizes, strict=True)
        ]
        self._page = Page(len(self.parts))
        self._served: dict[int, UInt8s] = {}
        self._missing: Int64s = np.ones(len(self.parts), np.int64)
        self.upstream: Member | None = None
        self._copy = Page(len(self.parts))
        """Of the page of the node before."""
        self._known_wire = b""
        self._timeout_s = 0.0
        wire.register(self._page.bytes)

    @property
    def address(self) -> str:
        page = self._page.bytes
        return msgspec.json.encode(Endpoint(self._wire.address(), page.ctypes.data, page.nbytes)).decode()

    def join(self, topology: Topology, member: Member) -> None:
        """Learn which node comes before `member`; none before the first."""
        names = {node.name: node for node in topology.nodes}
        before = [names[sender] for sender, to in topology.audience.items() if member.name in to and sender in names]
        self.upstream = before[0] if before else None
        self._wire.admit(Admission(addresses=topology.host_addresses))

    def read_from(self, topology: Topology) -> Topology:
        """`topology` with everybody whom this node reads in place of the trainer ranks."""
        before = (self.upstream,) if self.upstream else ()
        return replace(topology, trainers=(*topology.trainers, *before))

    def connect(self, wire: Wire, timeout_s: float) -> None:
        """Make the node before readable through `wire`, which is the reading one. Raises TransportError naming it."""
        if self.upstream is None:
            return
        wire.register(self._copy.bytes)
        self._known_wire, self._timeout_s = self._endpoint.wire, timeout_s
        try:
            wire.connect(UPSTREAM, self._known_wire, timeout_s)
        except TransportError as exc:
            message = f"it cannot be reached: {exc.message}"
            raise TransportError(message, phase="prepare", member=self.upstream.name) from exc

    @property
    def _endpoint(self) -> Endpoint:
        assert self.upstream is not None
        return parsed(self.upstream.address, Endpoint, "the address of a node")

    def _offer(self, publication: int, slot: UInt8s, buckets: Sequence[Bucket]) -> None:
        """Let the next node read `slot`, and no other any more, as it fills with `buckets`."""
        for address in self._served.keys() - {slot.ctypes.data}:
            self._wire.deregister(self._served.pop(address))
        if slot.ctypes.data not in self._served:
            self._wire.register(slot)
            self._served[slot.ctypes.data] = slot
        self._missing = np.zeros(len(self.parts), np.int64)
        for bucket in buckets:
            self._missing[self._touched_by(bucket)] += 1
        self._page.write(publication, slot.ctypes.data, self._wire.address(), self._missing == 0)
        self._wire.changed()

    def _arrived(self, bucket: Bucket) -> None:
        touched = self._touched_by(bucket)
        self._missing[touched] -= 1
        self._page.parts[touched] = self._missing[touched] == 0
        self._wire.changed()

    def in_order(self, buckets: Sequence[Bucket]) -> list[Bucket]:
        """`buckets` in the order in which parts are complete early: short pieces, which fill many parts, come first."""
        return sorted(buckets, key=lambda bucket: int(self._places_of(bucket)[0].min()))

    def _places_of(self, bucket: Bucket) -> tuple[Int64s, Int64s]:
        """Where in the slot the bytes of `bucket` lie: beginnings and ends."""
        if not bucket.scatter:
            starts = np.array([part.dst_offset for part in bucket.ranges], np.int64)
            return starts, starts + np.array([part.nbytes for part in bucket.ranges], np.int64)
        extents = extents_of(self._plan.layout, self._plan.boxes.take(np.asarray(bucket.scatter)))
        return extents.offset, extents.offset + (extents.rows - 1) * extents.stride + extents.run_nbytes

    def _touched_by(self, bucket: Bucket) -> Int64s:
        """The parts of the slot in which some bytes of `bucket` lie."""
        starts, ends = self._places_of(bucket)
        first, last = starts // self._part_nbytes, (ends - 1) // self._part_nbytes
        touched = np.zeros(len(self.parts) + 1, np.int64)
        np.add.at(touched, first, 1)
        np.add.at(touched, last + 1, -1)
        return np.flatnonzero(np.cumsum(touched)[:-1])

    def fetch(
        self,
        loop: FetchLoop,
        reader: WireReader,
        publication: int,
        buckets: Sequence[Bucket],
        served: UInt8s,
        deadline: float,
    ) -> int:
        """Fill `reader.slot` and offer what is there to the next node; the bytes of tensors that were moved.

        `served` is the memory of the slot, too, for the next node. `loop` and `reader` are those for the owners;
        `buckets` is what they hold, `in_order`. Raises TransportError.
        """
        loop.on_bucket = self._arrived
        loop.max_in_flight = IN_FLIGHT
        loop.interleave = False  # they are in order
        if self.upstream is None:
            self._offer(publication, served, buckets)
            return loop.run(buckets)
        self._offer(publication, served, self.parts)
        if not self.parts:
            return 0
        upstream = self.upstream
        loop.reader = source = UpstreamReader(
            self, reader.wire, upstream, self._endpoint, self._copy, reader.slot, publication, reader.version
        )
        loop.name_of = lambda _: upstream.name
        loop.run(self.parts)
        source.check(deadline)
        return self._plan.layout.payload_nbytes

    def learn(self, wire: Wire, address: bytes) -> None:
        """The node before has perhaps registered more memory. Nothing of its is in flight."""
        if address != self._known_wire:
            wire.connect(UPSTREAM, address, self._timeout_s)
            self._known_wire = address

    def close(self) -> None:
        self._page.words[0] = Page.EMPTY
        self._wire.changed()
        self._wire.close()
        self._served.clear()


@dataclass
class _Pending:
    part: Range
    handle: Any = None


@dataclass
class UpstreamReader:
    """The `RangeReader` of one publication from the node before. A transfer begins when its part is there."""

    link: ChainLink
    wire: Wire
    member: Member
    endpoint: Endpoint
    copy: Page
    slot: UInt8s
    publication: int
    version: int
    _slot_address: int | None = None
    _look: Any = None
    """The page, on its way."""
    _next_look_s: float = 0.0
    _ready: set[int] = field(default_factory=set)

    def start(self, owner: int, ranges: Sequence[Range], *, bounce: bool) -> _Pending:
        (part,) = ranges
        return _Pending(part)

    def is_done(self, transfer: _Pending) -> bool:
        try:
            part = transfer.part
            if transfer.handle is None:
                if not self._is_there(part.src_offset):
                    return False
                assert self._slot_address is not None
                target = self.slot.ctypes.data + part.dst_offset
                transfer.handle = self.wire.read(UPSTREAM, self._slot_address + part.src_offset, target, part.nbytes)
            return self.wire.is_done(transfer.handle)
        except TransportError as exc:
            raise self._located(exc.message) from exc

    def wait(self, timeout_s: float) -> None:
        self.wire.wait(timeout_s)

    def cancel(self, transfer: _Pending) -> None:
        """The engine closes the wire after every failure; that ends this transfer with all others."""

    def check(self, deadline: float) -> None:
        """Raise TransportError if the node before does not hold the publication any more."""
        try:
            handle = self._read(0, Page.HEADER)
            while not (is_done := self.wire.is_done(handle)) and time.monotonic() < deadline:
                self.wait(STOPPED_S)
        except TransportError as exc:
            raise self._located(exc.message) from exc
        if not is_done:
            raise TransportTimeout("it cannot be read", version=self.version, phase="stage", member=self.member.name)
        if self.copy.words[0] != self.publication:
            raise self._located("it received other bytes while it was read")

    def _is_there(self, offset: int) -> bool:
        """Whether the part that begins at `offset` is there, as far as this node knows; looks again at times."""
        part = offset // self.link.parts[0].nbytes
        if self._slot_address is not None and self.copy.parts[part]:
            return True
        if self._look is None:
            if time.monotonic() >= self._next_look_s:
                begun = self._slot_address is not None
                # The parts are read only after the publication has been seen: before, they may be another's.
                span = (Page.PARTS, self.endpoint.page_nbytes) if begun else (0, Page.PARTS)
                self._look = self._watch(*span)
        elif self.wire.is_done(self._look):
            self._look = None
            self._next_look_s = 0.0 if self.wire.tells else time.monotonic() + POLL_S
            if self._slot_address is None and self.copy.words[0] == self.publication:
                self.copy.parts[:] = 0
                self.link.learn(self.wire, self.copy.wire)
                self._slot_address = int(self.copy.words[1])
                self._next_look_s = 0.0
        return False

    def _read(self, low: int, high: int) -> Any:
        return self.wire.read(*self._span(low, high))

    def _watch(self, low: int, high: int) -> Any:
        return self.wire.watch(*self._span(low, high))

    def _span(self, low: int, high: int) -> tuple[int, int, int, int]:
        """Of the page of the node before, and of its copy."""
        return UPSTREAM, self.endpoint.page + low, self.copy.bytes.ctypes.data + low, high - low

    def _located(self, message: str) -> TransportError:
        return TransportError(message, version=self.version, phase="stage", member=self.member.name)
