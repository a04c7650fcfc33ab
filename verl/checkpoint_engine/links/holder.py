"""How one-sided backends pass a version from node to node: `topology.py` says who reads from whom, as data.

    chain            owners --> node 0 --> node 1 --> node 2
    tree             owners --> node 0 --> node 1, node 2 --> node 3, ...
    p2p_broadcast    owners --> nodes 0 and 1, half each --> node 2 --> ... and round to node 0

Every node is a holder: it serves its open slot while it fills. The slot is cut into parts; a page of its own, next to
the slot and never inside it, says which parts are there. Who comes after it reads that page, and then those parts,
through the same wire. A part arrives either from the owners or from the node before.

What keeps versions apart: every node reads the stamps of all owners, before and after, as without other nodes. Their
digest stands in the page, written last. It differs for every publication, also for one of the same version that is
tried again, so a page that shows a node's own digest speaks of the bytes that this node is to have.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise, zip_longest
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
import xxhash

from ..errors import TransportError, TransportTimeout
from ..plan.encoded import parsed
from ..plan.layout import align
from ..plan.shards import Int64s, extents_of
from ..plan.sync_plan import SyncPlan
from ..plan.topology import Topology
from ..plan.types import Member, Range
from ..support.admission import Admission
from .fetch import STOPPED_S, Bucket, FetchLoop, messages_of
from .wire import UInt8s, Wire, WireReader

UPSTREAM = -1
"""Stands for the node before, where a wire or a bucket names an owner."""
LOOK_S = 0.001
"""Between two looks at the page of the node before, if the wire does not tell."""
PARTS = 256
"""Into so many is a slot cut, unless they were too small or too large then. A hop delays a version by a few of them."""
LEAST_PART_NBYTES = 2**20
"""A read costs some hundred microseconds beside its bytes, and a part may be seen a millisecond late."""
MOST_RECEIVERS = 64
"""Each may add a part, and a page has room for so many."""
IN_FLIGHT = 2
"""Buckets from owners, and parts from the node before. More share the network, and all of them are there later."""


class Endpoint(msgspec.Struct, frozen=True):
    """What a node's `Member.address` holds if nodes pass a version on, as JSON."""

    wire: bytes
    page: int
    page_nbytes: int


class Page:
    """[publication, address of the slot, bytes of the wire's address], the wire's address, one byte per part, [whom the
    node waits for].

    A wire's address may change when memory is registered, so it travels in the page, too.
    """

    HEADER = 24
    MAX_ADDRESS = 2**16
    PARTS = HEADER + MAX_ADDRESS
    WORD = 8
    EMPTY = 0
    """No publication, and nobody who is waited for."""

    def __init__(self, num_parts: int) -> None:
        self.bytes: UInt8s = np.zeros(self.PARTS + align(num_parts) + self.WORD, np.uint8)

    @property
    def words(self) -> Int64s:
        return self.bytes[: self.HEADER].view(np.int64)

    @property
    def parts(self) -> UInt8s:
        return self.bytes[self.PARTS : -self.WORD]

    @property
    def awaited(self) -> Int64s:
        """One word: 1 + index of a trainer rank, -(1 + index) of a node, or `EMPTY`."""
        return self.bytes[-self.WORD :].view(np.int64)

    @property
    def wire(self) -> bytes:
        return self.bytes[self.HEADER : self.HEADER + int(self.words[2])].tobytes()

    def write(self, publication: int, slot: int, wire: bytes, ready: npt.NDArray[np.bool_]) -> None:
        if len(wire) > self.MAX_ADDRESS:
            raise TransportError(f"the address of the wire has {len(wire)} bytes, more than {self.MAX_ADDRESS}")
        self.words[0] = self.awaited[0] = self.EMPTY
        self.parts[: len(ready)] = ready
        self.bytes[self.HEADER : self.HEADER + len(wire)] = np.frombuffer(wire, np.uint8)
        self.words[1:] = slot, len(wire)
        self.words[0] = publication


def part_nbytes_for(slot_nbytes: int, most_nbytes: int) -> int:
    """How large the parts of a slot are, and the buckets that fill them. Pure."""
    return min(max(-(-slot_nbytes // PARTS), LEAST_PART_NBYTES), most_nbytes)


def publication_of(stamps: Int64s) -> int:
    """A number other than `Page.EMPTY` that is equal exactly where the stamps of all owners are."""
    return (xxhash.xxh3_64_intdigest(stamps.tobytes()) >> 1) | 1


def shares_of(plan: SyncPlan, num_receivers: int) -> list[Range]:
    """The slot in as many runs as there are receivers, about equally long and cut between pieces. Pure."""
    nbytes = plan.layout.nbytes
    starts = np.sort(plan.extents.offset)
    ends = np.maximum.accumulate(plan.extents.end[np.argsort(plan.extents.offset, kind="stable")])
    # Where a piece begins after all pieces before it have ended.
    possible = np.concatenate([[0], starts[1:][starts[1:] >= ends[:-1]], [nbytes]])
    wished = np.arange(num_receivers + 1) * nbytes // num_receivers
    after = np.clip(np.searchsorted(possible, wished), 1, len(possible) - 1)
    nearer = wished - possible[after - 1] < possible[after] - wished
    cuts = possible[after - nearer].tolist()
    return [Range(low, low, high - low) for low, high in zip(cuts[:-1], cuts[1:], strict=True)]


def parts_of(shares: Sequence[Range], part_nbytes: int) -> list[Bucket]:
    """`shares` in parts of at most `part_nbytes`, as buckets from the node before. Pure."""
    return [
        Bucket(UPSTREAM, (Range(start, start, nbytes),), nbytes)
        for share in shares
        for start in range(share.dst_offset, share.dst_offset + share.nbytes, part_nbytes)
        for nbytes in [min(part_nbytes, share.dst_offset + share.nbytes - start)]
    ]


@dataclass(frozen=True)
class Cut:
    """How memory that is passed on is cut. The same on every node but for `own`."""

    parts: Sequence[Bucket]
    shares: Int64s
    """Where the shares of receivers begin."""
    starts: Int64s
    """Where the parts begin."""
    own: Range | None
    """What this node gets from owners."""

    @classmethod
    def of(cls, shares: Sequence[Range], part_nbytes: int, own: int | None) -> Cut:
        """`own`: which of the shares is that of this node. Pure."""
        parts = parts_of(shares, part_nbytes)
        return cls(
            parts,
            np.array([share.dst_offset for share in shares], np.int64),
            np.array([part.ranges[0].dst_offset for part in parts], np.int64),
            shares[own] if own is not None else None,
        )


class NodeHolder:
    """One node's part in passing a version on: what it offers to others, and what it gets from the node before."""

    def __init__(self, plan: SyncPlan, wire: Wire, part_nbytes: int, *, in_flight: int = IN_FLIGHT) -> None:
        """`wire` answers other nodes; it is closed with this. `in_flight`: buckets from owners, and parts."""
        self._plan = plan
        self._part_nbytes = part_nbytes
        self._in_flight = in_flight
        self._wire = wire
        room = -(-plan.layout.nbytes // part_nbytes) + MOST_RECEIVERS
        self._page, self._copy = Page(room), Page(room)
        """This node's own, and what is known of that of the node before."""
        self._served: dict[int, UInt8s] = {}
        self._receivers: tuple[int, int | None] = 1, None
        """How many there are, and which of them this node is."""
        self._cut = self._cut_of_slot = Cut.of([], part_nbytes, None)
        self._missing: Int64s = np.zeros(0, np.int64)
        """Of each part: how many buckets are to come."""
        self._upstream: Member | None = None
        self._known_wire = b""
        self._timeout_s = 0.0
        wire.register(self._page.bytes)

    @property
    def address(self) -> str:
        page = self._page.bytes
        return msgspec.json.encode(Endpoint(self._wire.address(), page.ctypes.data, page.nbytes)).decode()

    def join(self, topology: Topology, member: Member, bucket_nbytes: int) -> list[Bucket]:
        """Learn the place of `member`; the buckets that it reads from owners, in the order in which they shall come.

        Short pieces, which fill many parts, come first: a part is then complete early.
        """
        receivers = topology.receivers[:MOST_RECEIVERS]
        shares = shares_of(self._plan, len(receivers))
        own = receivers.index(member.name) if member.name in receivers else None
        self._receivers = len(receivers), own
        self._cut = self._cut_of_slot = Cut.of(shares, self._part_nbytes, own)
        self._upstream = topology.before(member.name)
        self._wire.admit(Admission(addresses=topology.host_addresses))
        if self._cut.own is None:
            return []
        buckets = [
            bucket
            for owner in range(self._plan.num_owners)
            for bucket in messages_of(self._plan, owner, min(bucket_nbytes, self._part_nbytes), self._cut.own)
        ]
        return sorted(buckets, key=lambda bucket: int(self._places_of(bucket)[0].min()))

    def cut_of(self, nbytes: int) -> Cut:
        """Of so many bytes that are not a slot, cut anywhere."""
        count, own = self._receivers
        bounds = [align(nbytes * turn // count) for turn in range(count)] + [nbytes]
        shares = [Range(low, low, max(high - low, 0)) for low, high in pairwise(bounds)]
        return Cut.of(shares, self._part_nbytes, own)

    @property
    def upstream(self) -> Member | None:
        return self._upstream

    def connect(self, wire: Wire, timeout_s: float) -> None:
        """Make the node before readable through `wire`, which is the reading one. Raises TransportError naming it."""
        if self._upstream is None:
            return
        wire.register(self._copy.bytes)
        self._known_wire, self._timeout_s = self._endpoint.wire, timeout_s
        try:
            wire.connect(UPSTREAM, self._known_wire, timeout_s)
        except TransportError as exc:
            message = f"it cannot be reached: {exc.message}"
            raise TransportError(message, phase="prepare", member=self._upstream.name) from exc

    @property
    def _endpoint(self) -> Endpoint:
        assert self._upstream is not None
        return parsed(self._upstream.address, Endpoint, "the address of a node")

    def fetch(
        self,
        loop: FetchLoop,
        reader: WireReader,
        publication: int,
        buckets: Sequence[Bucket],
        served: UInt8s,
        deadline: float,
        cut: Cut | None = None,
    ) -> None:
        """Fill `reader.slot` and offer what is there to other nodes.

        `served` is the memory of the slot, too, for other nodes. `loop` and `reader` are those for the owners;
        `buckets` are those of `join`, or what `cut` gives this node of other memory. Raises TransportError.
        """
        self._cut = cut or self._cut_of_slot
        passed = self._passed()
        self._offer(publication, served, [*buckets, *(self._cut.parts[number] for number in passed)])
        loop.on_bucket = self._arrived
        loop.on_stall = lambda owners: self._say_who_is_awaited(1 + max(owners))
        if not passed:
            loop.fetch(InTurn(self._in_flight, buckets))
            return
        upstream = self._upstream
        assert upstream is not None
        source = UpstreamReader(self, reader, upstream, self._endpoint, self._copy, publication)
        loop.reader = source
        loop.name_of = lambda owner: _name(source.blamed(owner))
        loop.on_stall = lambda owners: self._say_who_is_awaited(source.blamed(max(owners)))
        loop.fetch(InTurn(self._in_flight, buckets, self._cut.parts, passed, source.there))
        source.check(deadline)

    def _passed(self) -> list[int]:
        """The numbers of the parts that come from the node before, those of all receivers by turns."""
        if self._upstream is None:
            return []
        shares: dict[int, list[int]] = {}
        own = self._cut.own
        for number, start in enumerate(self._cut.starts.tolist()):
            if own is None or not 0 <= start - own.dst_offset < own.nbytes:
                share = int(np.searchsorted(self._cut.shares, start, side="right"))
                shares.setdefault(share, []).append(number)
        return [number for turn in zip_longest(*shares.values()) for number in turn if number is not None]

    def _offer(self, publication: int, slot: UInt8s, buckets: Sequence[Bucket]) -> None:
        """Let other nodes read `slot`, and no other any more, as it fills with `buckets`."""
        for address in self._served.keys() - {slot.ctypes.data}:
            self._wire.deregister(self._served.pop(address))
        if slot.ctypes.data not in self._served:
            self._wire.register(slot)
            self._served[slot.ctypes.data] = slot
        self._missing = np.zeros(len(self._cut.parts), np.int64)
        for bucket in buckets:
            self._missing[self._touched_by(bucket)] += 1
        self._page.write(publication, slot.ctypes.data, self._wire.address(), self._missing == 0)
        self._wire.changed()

    def _arrived(self, bucket: Bucket) -> None:
        touched = self._touched_by(bucket)
        self._missing[touched] -= 1
        self._page.parts[touched] = self._missing[touched] == 0
        self._page.awaited[0] = Page.EMPTY
        self._wire.changed()

    def _places_of(self, bucket: Bucket) -> tuple[Int64s, Int64s]:
        """Where in the slot the bytes of `bucket` lie: beginnings and ends."""
        if not bucket.scatter:
            starts = np.array([part.dst_offset for part in bucket.ranges], np.int64)
            return starts, starts + np.array([part.nbytes for part in bucket.ranges], np.int64)
        extents = extents_of(self._plan.layout, self._plan.boxes.take(np.asarray(bucket.scatter)))
        return extents.offset, extents.end

    def _touched_by(self, bucket: Bucket) -> Int64s:
        """The parts of the slot in which some bytes of `bucket` lie."""
        starts, ends = self._places_of(bucket)
        first = np.searchsorted(self._cut.starts, starts, side="right") - 1
        last = np.searchsorted(self._cut.starts, ends - 1, side="right") - 1
        touched = np.zeros(len(self._cut.parts) + 1, np.int64)
        np.add.at(touched, first, 1)
        np.add.at(touched, last + 1, -1)
        return np.flatnonzero(np.cumsum(touched)[:-1])

    def _say_who_is_awaited(self, code: int) -> None:
        if self._page.awaited[0] != code:
            self._page.awaited[0] = code
            self._wire.changed()

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


class InTurn:
    """Buckets from owners in their order; beside them parts from the node before, as soon as they are there."""

    def __init__(
        self,
        in_flight: int,
        own: Sequence[Bucket],
        parts: Sequence[Bucket] = (),
        passed: Sequence[int] = (),
        there: Callable[[], UInt8s] = lambda: np.zeros(0, np.uint8),
    ) -> None:
        """At most `in_flight` of each kind are under way. Of all `parts` those numbered `passed` are wanted; those of
        which `there` is not 0 can be read."""
        self._in_flight = in_flight
        self._own, self._parts, self._there = deque(own), parts, there
        self._passed = np.array(passed, np.int64)

    def next(self, flying: Collection[Bucket]) -> Bucket | None:
        of_node = sum(bucket.owner == UPSTREAM for bucket in flying)
        if self._own and len(flying) - of_node < self._in_flight:
            return self._own[0]
        if len(self._passed) and of_node < self._in_flight:
            ready = np.flatnonzero(self._there()[self._passed])
            return self._parts[int(self._passed[ready[0]])] if len(ready) else None
        return None

    def remove(self, bucket: Bucket) -> None:
        if bucket.owner == UPSTREAM:
            self._passed = self._passed[[self._parts[number] is not bucket for number in self._passed.tolist()]]
        else:
            self._own.popleft()

    def __iter__(self) -> Iterator[Bucket]:
        yield from self._own
        yield from (self._parts[number] for number in self._passed.tolist())

    def __len__(self) -> int:
        return len(self._own) + len(self._passed)


@dataclass
class UpstreamReader:
    """The `RangeReader` of one publication from owners and from the node before."""

    holder: NodeHolder
    owners: WireReader
    member: Member
    endpoint: Endpoint
    copy: Page
    publication: int
    _slot_address: int | None = None
    _look: Any = None
    """The page, on its way."""
    _next_look_s: float = 0.0

    def __post_init__(self) -> None:
        self._nothing = np.zeros_like(self.copy.parts)

    def start(self, owner: int, ranges: Sequence[Range], *, bounce: bool) -> tuple[int, Any]:
        if owner != UPSTREAM:
            return owner, self.owners.start(owner, ranges, bounce=bounce)
        assert self._slot_address is not None
        (part,) = ranges
        target = self.owners.slot.ctypes.data + part.dst_offset
        with self._located():
            return owner, self._wire.read(UPSTREAM, self._slot_address + part.src_offset, target, part.nbytes)

    def is_done(self, transfer: tuple[int, Any]) -> bool:
        owner, handle = transfer
        if owner != UPSTREAM:
            return self.owners.is_done(handle)
        with self._located():
            return self._wire.is_done(handle)

    def wait(self, timeout_s: float) -> None:
        self.owners.wait(timeout_s)

    def cancel(self, transfer: tuple[int, Any]) -> None:
        """The engine closes the wire after every failure; that ends this transfer with all others."""

    def there(self) -> UInt8s:
        """Of each part, not 0 if the node before holds it, as far as this one knows; looks again at times."""
        with self._located():
            self._learn()
        return self.copy.parts if self._slot_address is not None else self._nothing

    def blamed(self, owner: int) -> int:
        """Who keeps `owner` from delivering, as far as its page says; as `Page.awaited` has it."""
        if owner != UPSTREAM:
            return 1 + owner
        if self._slot_address is not None and self.copy.awaited[0] != Page.EMPTY:
            return int(self.copy.awaited[0])
        return -(1 + self.member.index)

    def check(self, deadline: float) -> None:
        """Raise TransportError if the node before does not hold the publication any more."""
        with self._located():
            handle = self._wire.read(*self._span(0, Page.HEADER))
            while not (is_done := self._wire.is_done(handle)) and time.monotonic() < deadline:
                self.wait(STOPPED_S)
        if not is_done:
            raise TransportTimeout("it cannot be read", version=self._version, phase="stage", member=self.member.name)
        if self.copy.words[0] != self.publication:
            raise self._error("it received other bytes while it was read")

    def _learn(self) -> None:
        """What the page says, if it has arrived."""
        if self._look is None:
            if time.monotonic() >= self._next_look_s:
                begun = self._slot_address is not None
                # The parts are read only after the publication has been seen: before, they may be another's.
                span = (Page.PARTS, self.endpoint.page_nbytes) if begun else (0, Page.PARTS)
                self._look = self._wire.watch(*self._span(*span))
        elif self._wire.is_done(self._look):
            self._look = None
            self._next_look_s = 0.0 if self._wire.tells else time.monotonic() + LOOK_S
            if self._slot_address is None and self.copy.words[0] == self.publication:
                self.copy.parts[:] = 0
                self.copy.awaited[0] = Page.EMPTY
                self.holder.learn(self._wire, self.copy.wire)
                self._slot_address = int(self.copy.words[1])
                self._next_look_s = 0.0

    @property
    def _wire(self) -> Wire:
        return self.owners.wire

    @property
    def _version(self) -> int:
        return self.owners.version

    def _span(self, low: int, high: int) -> tuple[int, int, int, int]:
        """Of the page of the node before, and of its copy."""
        return UPSTREAM, self.endpoint.page + low, self.copy.bytes.ctypes.data + low, high - low

    @contextmanager
    def _located(self) -> Iterator[None]:
        try:
            yield
        except TransportError as exc:
            raise self._error(exc.message) from exc

    def _error(self, message: str) -> TransportError:
        return TransportError(message, version=self._version, phase="stage", member=self.member.name)


def _name(code: int) -> str:
    """Of the member that `Page.awaited` means."""
    return f"trainer-{code - 1}" if code > 0 else f"node-{-code - 1}"
