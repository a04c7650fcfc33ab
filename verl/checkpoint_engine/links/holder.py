"""How one-sided backends forward a version from node to node; `topology.py` decides which node reads from which.

    chain            owners --> node 0 --> node 1 --> node 2
    tree             owners --> node 0 --> node 1, node 2 --> node 3, ...
    p2p_broadcast    owners --> nodes 0 and 1, half each --> node 2 --> ... and round to node 0

Every node is a holder: it serves its open slot while it fills. The slot is cut into parts; a page next to the slot,
never inside it, lists the parts that have arrived. The next node reads that page, and then those parts, through the
same wire. A part arrives either from the owners or from the upstream node.

Every node reads the stamps of all owners before and after a transfer. Their digest identifies the publication: it
differs for every one, also for a second one of the same version. A node writes it last into its page. So a node reads
parts only if the upstream page has the digest that the node computed.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise, zip_longest

import msgspec
import numpy as np

from ..errors import TransportError
from ..plan.encoded import parsed
from ..plan.layout import align
from ..plan.shards import Int64s, extents_of
from ..plan.sync_plan import SyncPlan
from ..plan.topology import Topology
from ..plan.types import Member, Range
from ..support.admission import Admission
from .cuts import UPSTREAM, Cut, InTurn, shares_of
from .fetch import Bucket, FetchLoop, messages_of
from .upstream import Endpoint, Page, UpstreamReader, name_of
from .wire import UInt8s, Wire, WireReader

MOST_RECEIVERS = 64
"""Nodes that read from trainer ranks. Each may add a part, and a page has room for as many."""
IN_FLIGHT = 2
"""Buckets from owners, and as many parts from the upstream node. More would share the network and delay each other."""


class NodeHolder:
    """A forwarding node: it serves its slot to the nodes after it, and reads from owners and the upstream node."""

    def __init__(self, plan: SyncPlan, wire: Wire, part_nbytes: int, *, in_flight: int = IN_FLIGHT) -> None:
        """`wire` serves other nodes; `close` closes it. `in_flight`: buckets from owners, and as many parts."""
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
        """Set the place of `member` in the topology. Returns the buckets that it reads from owners, in order of offset.

        Buckets of short pieces are in many parts. They come as early as the first of these parts.
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
        """The cut of `nbytes` of other memory than a slot, such as deltas; pieces do not matter."""
        count, own = self._receivers
        bounds = [align(nbytes * turn // count) for turn in range(count)] + [nbytes]
        shares = [Range(low, low, max(high - low, 0)) for low, high in pairwise(bounds)]
        return Cut.of(shares, self._part_nbytes, own)

    @property
    def upstream(self) -> Member | None:
        return self._upstream

    def connect(self, wire: Wire, timeout_s: float) -> None:
        """Connect `wire`, with which this node reads, to the upstream node. Raises TransportError naming that node."""
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
        """Fill `reader.slot`, and serve to other nodes the parts that have arrived. Raises TransportError.

        `served` is the same memory as other nodes may read it. `loop` and `reader` read from the owners. `buckets` are
        those of `join`, or this node's share of other memory, cut by `cut`.
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
        source = UpstreamReader(self.learn, reader, upstream, self._endpoint, self._copy, publication)
        loop.reader = source
        loop.name_of = lambda owner: name_of(source.blamed(owner))
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
        """Reconnect `wire` if the upstream node has registered more memory. No read from that node is in flight."""
        if address != self._known_wire:
            wire.connect(UPSTREAM, address, self._timeout_s)
            self._known_wire = address

    def close(self) -> None:
        self._page.words[0] = Page.EMPTY
        self._wire.changed()
        self._wire.close()
        self._served.clear()
