"""The process groups in which owners broadcast their pieces, one per owner, on one of their members.

Groups are built over their own store, which trainer 0 hosts on a free port under a new name per `prepare`. They use no
global state of torch.distributed, so several engines fit into one process.

Every transfer begins with a header broadcast in each group: version, layout, size, and whether deltas follow instead of
the weights. A receiver refuses another version than the requested one before a byte of weights arrives. A group
whose transfer failed is never used again: bytes left in its connections would be read as part of the next transfer.
The manager then prepares and connects again.
"""

from __future__ import annotations

import struct
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from ..compat.torch import PrefixStore, Store, TCPStore
from ..config import CheckpointEngineConfig, GlooOptions
from ..errors import TransportError, TransportTimeout
from ..plan.sync_plan import SyncPlan
from ..plan.topology import Topology, lane_of
from ..plan.types import Member, Range
from ..support.admission import Admission, Doorkeeper
from .attempt import Attempt
from .communicators import Communicator, Flight
from .fetch import Bucket, FetchLoop
from .network import LOOPBACK, own_address
from .rendezvous import (
    POLL_S,
    PULSE_S,
    QUIET_S,
    Deadline,
    MeetingPlace,
    Members,
    failures,
)

OWN_SHARE = 0.9
"""A member's fraction of a phase's deadline: its error names the late member, so it must precede the manager's."""
HEADER = struct.Struct("<qqqqq16s")
"""Version, number of messages, bytes of weights, `Leads`, digest of the layout."""
Leads = tuple[int, int]
"""The identity of the base of an owner's deltas, and their bytes; both 0 if its weights follow."""


class OwnerGroups:
    """One member's groups. Used from one thread; another one sets `stop` to end every wait."""

    def __init__(
        self,
        *,
        member: Member,
        config: CheckpointEngineConfig,
        options: GlooOptions,
        communicator: Communicator,
        stop: threading.Event,
    ) -> None:
        self.messages: dict[int, list[Bucket]] = {}
        """The buckets that each owner broadcasts in order, for the groups of this member."""
        self._member = member
        self._deadlines = config.deadlines
        self._options = options
        self._communicator = communicator
        self._stop = stop
        self._layout_digest = b""
        self._place: MeetingPlace | None = None
        self._server: TCPStore | None = None
        self._doors: Doorkeeper | None = None
        self._groups: dict[int, Any] = {}
        self._members: Members | None = None

    def host_store(self) -> str:
        """Reserve the store's port; return `host:port/name`. Called on one member, before any member's `connect`."""
        host = own_address(self._options.interface)
        try:
            self._place = MeetingPlace(host)
        except OSError as exc:
            raise TransportError(f"no free port of {host}: {exc}", phase="prepare") from exc
        return f"{host}:{self._place.port}/{uuid.uuid4().hex}"

    def expect(self, plan: SyncPlan, messages: Mapping[int, list[Bucket]]) -> None:
        """Set the buckets of each owner in whose group this member is."""
        self._layout_digest = bytes.fromhex(plan.layout.digest)
        self.messages = dict(messages)

    def connect(self, topology: Topology) -> None:
        """Join the groups; every member of `topology` calls it. Raises TransportError naming the absent members."""
        deadline = Deadline(self._deadlines.prepare_s * OWN_SHARE)
        inside = topology.is_on_one_host and self._options.interface is None
        with failures("listening", None, "prepare"):
            self._listen(topology, inside)
        names = [member.name for member in (*topology.trainers, *topology.nodes)]
        members = Members(self._member.name, names)

        def join() -> dict[int, Any]:
            host = topology.trainers[0]
            _, _, port = host.address.rpartition(":")
            address = f"{LOOPBACK}:{port}" if inside else host.address
            with failures(f"connecting to {host.name} at {address}", None, "prepare"):
                members.join(self._server, address, deadline, self._stop)
                return self._make_groups(members.store, topology)

        # On a thread of its own, because a store does not keep its timeouts when the process that hosts it is stopped.
        connecting = Attempt(join)
        while not connecting.done.wait(POLL_S):
            if self._stop.is_set() or deadline.passed:
                raise members.not_connected(deadline)
        self._members, self._groups = members, connecting.result()

    def _listen(self, topology: Topology, inside: bool) -> None:
        """`inside`: all members are on this host, and nobody needs to be reached from another one."""
        admission = Admission(addresses=topology.host_addresses)
        if self._doors is None:
            self._doors = Doorkeeper(admission)
        self._doors.admit(admission)
        host = LOOPBACK if inside else own_address(self._options.interface)
        self._communicator.listen_at(host, self._doors)
        if self._place is not None:
            place, self._place = self._place, None
            self._server = place.open(host, self._doors, self._deadlines.prepare_s)

    def _make_groups(self, store: Store, topology: Topology) -> dict[int, Any]:
        """One group per owner that has anything to send to this member, or that this member is; all in use once."""
        groups: dict[int, Any] = {}
        try:
            for owner in sorted(self.messages):
                names = topology.group_of(self.name_of(owner))
                own = PrefixStore(names[0], store)
                lane = lane_of(owner, num_owners=len(topology.trainers))
                rank = names.index(self._member.name)
                groups[owner] = self._communicator.group(own, rank, len(names), lane, self._deadlines.stage_s)
            # Connections are made on first use; a stage should find them made.
            greetings = [
                self._communicator.broadcast(group, torch.zeros(1, dtype=torch.uint8), sending=self.is_sender(owner))
                for owner, group in groups.items()
            ]
            while not all(greeting.is_done() for greeting in greetings):
                time.sleep(POLL_S)
        except BaseException:
            self._give_up(groups)
            raise
        return groups

    def is_sender(self, owner: int) -> bool:
        return self.name_of(owner) == self._member.name

    def name_of(self, owner: int) -> str:
        return f"trainer-{owner}"

    def broadcast(self, owner: int, memory: torch.Tensor) -> Flight:
        """Begin to send `memory` (host, uint8) to the owner's group, or to receive into it. Borrowed until done."""
        return self._communicator.broadcast(self._groups[owner], memory, sending=self.is_sender(owner))

    def release(self) -> None:
        """Leave all groups; close the store if this member hosts it. Idempotent."""
        self._leave_all(self._groups)
        self._communicator.release()
        self._members = None
        if self._place is not None:
            self._place.close()
            self._place = None
        self._server = None
        if self._doors is not None:
            self._doors.close()
            self._doors = None

    @contextmanager
    def transfer(self, version: int) -> Iterator[None]:
        """The block in which members broadcast `version`. Any error inside gives up the groups."""
        if self._members is None or self.messages.keys() - self._groups.keys():
            raise TransportError("not connected, or no longer after a failure", version=version, phase="stage")
        try:
            with self._members.taking_part(), self._blaming(self._members), failures("a broadcast", version):
                yield
        except BaseException:
            given_up, self._groups = self._groups, {}
            self._give_up(given_up)
            raise

    def _give_up(self, groups: dict[int, Any]) -> None:
        """Leave `groups`, of which one is broken: it is gone only when its last operation has ended, at the latest
        after the stage's deadline. Nobody waits for that here."""
        threading.Thread(target=self._leave_all, args=(groups,), name="weight-sync-given-up", daemon=True).start()

    def _leave_all(self, groups: dict[int, Any]) -> None:
        while groups:
            self._communicator.leave(groups.popitem()[1])

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

    def header(self, version: int, owner: int, deltas: Leads = (0, 0)) -> torch.Tensor:
        messages = self.messages[owner]
        fields = (version, len(messages), sum(bucket.nbytes for bucket in messages), *deltas)
        return torch.frombuffer(bytearray(HEADER.pack(*fields, self._layout_digest)), dtype=torch.uint8)

    def exchange_headers(self, version: int, deadline: Deadline) -> dict[int, Leads]:
        """Broadcast the header in this member's own group, and compare the other owners' headers with the expected.

        Returns each owner's `Leads`. Raises TransportError if another field differs.
        """
        said: dict[int, Leads] = {}
        headers = {
            owner: self.header(version, owner) if self.is_sender(owner) else torch.zeros(HEADER.size, dtype=torch.uint8)
            for owner in self.messages
        }
        self.wait({owner: self.broadcast(owner, header) for owner, header in headers.items()}, version, deadline)
        for owner, header in headers.items():
            sent, _, _, *deltas, _ = HEADER.unpack(header.numpy().tobytes())
            said[owner] = deltas[0], deltas[1]
            if not torch.equal(header, self.header(version, owner, said[owner])):
                what = f"version {sent}" if sent != version else "another layout or other buckets"
                message = f"{self.name_of(owner)} sends {what} where version {version} is expected"
                raise TransportError(message, version=version, phase="stage")
        return said

    def wait(self, flights: Mapping[int, Flight], version: int, deadline: Deadline) -> None:
        """Wait until all `flights`, by owner, are done. Raises TransportTimeout naming the late owners."""
        waiting = dict(flights)
        while True:
            for owner, flight in list(waiting.items()):
                with failures(f"the broadcast of {self.name_of(owner)}", version):
                    if flight.is_done():
                        del waiting[owner]
            if not waiting:
                return
            if self._stop.is_set():
                raise TransportError("given up by the manager", version=version, phase="stage")
            if deadline.passed:
                owners = ", ".join(map(self.name_of, waiting))
                message = f"the broadcast of {owners} not done within {deadline.timeout_s:.1f} s"
                raise TransportTimeout(message, version=version, phase="stage")
            time.sleep(POLL_S)

    def fetch(
        self,
        reader: Broadcasts,
        plan: SyncPlan,
        deadline: Deadline,
        messages: Mapping[int, list[Bucket]],
        on_bucket: Callable[[Bucket], None] = lambda bucket: None,
    ) -> int:
        """Receive, or send, the `messages` that owners broadcast next, several at a time; return their bytes."""
        loop = FetchLoop(
            reader=reader,
            plan=plan,
            region=reader.slot.numpy(),
            bounce=reader.bounce.numpy(),
            version=reader.version,
            timeout_s=deadline.remaining_s,
            stop=self._stop,
            max_in_flight=self._communicator.max_in_flight(self._options.in_flight, len(messages)),
            on_bucket=on_bucket,
        )
        return loop.run([bucket for owner in sorted(messages) for bucket in messages[owner]])


@dataclass
class Broadcasts:
    """A `RangeReader` over the owners' groups: it receives each message at the `dst_offset` of its range."""

    groups: OwnerGroups
    slot: torch.Tensor
    bounce: torch.Tensor
    version: int

    def start(self, owner: int, ranges: Sequence[Range], *, bounce: bool) -> tuple[int, Flight]:
        (message,) = ranges
        memory = (self.bounce if bounce else self.slot)[message.dst_offset : message.dst_offset + message.nbytes]
        return owner, self.groups.broadcast(owner, memory)

    def is_done(self, transfer: tuple[int, Flight]) -> bool:
        owner, flight = transfer
        with failures(f"the broadcast of {self.groups.name_of(owner)}", self.version):
            return flight.is_done()

    def wait(self, timeout_s: float) -> None:
        time.sleep(min(timeout_s, POLL_S))

    def cancel(self, transfer: tuple[int, Flight]) -> None:
        """Does nothing: a broadcast cannot be cancelled. It keeps its memory, and the arena replaces that slot."""


def bounce_for(messages: Mapping[int, Sequence[Bucket]]) -> torch.Tensor:
    """Memory for the largest scattered bucket of `messages`."""
    sizes = (bucket.ranges[0].nbytes for buckets in messages.values() for bucket in buckets if bucket.scatter)
    return torch.zeros(max(sizes, default=0), dtype=torch.uint8)
