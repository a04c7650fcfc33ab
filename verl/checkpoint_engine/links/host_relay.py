"""The network part of the backend `naive`, on one trainer rank: pieces travel once to every other host.

    host 1   owner --writes--> slot ----+
                                        | broadcast in the owner's group, slot to slot
    host 2                     relay <--+--> slot, and from there the other slots of that host

A published rank sends its pieces from a slot of its host, so the trainer may change its weights, and no second copy is
needed. A relay receives into its host's slot. Only short and strided pieces pass through a buffer at both ends: one per
rank, of at most a bucket.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ..config import CheckpointEngineConfig, NaiveOptions
from ..memory.slot import SlotView
from ..plan.sync_plan import SyncPlan
from ..plan.topology import Topology
from ..plan.types import Member, Range
from .communicators import Flight
from .fetch import BounceBuffer, Bucket, messages_of
from .gloo_chain import GlooChain
from .owner_groups import OWN_SHARE, Broadcasts, OwnerGroups, bounce_for
from .rendezvous import Deadline


class HostRelay:
    """One trainer rank's end. Used from the thread of the sync; another thread sets `stop` to end every wait."""

    def __init__(self, *, member: Member, config: CheckpointEngineConfig, stop: threading.Event) -> None:
        options = config.options_of("naive", NaiveOptions)
        self._member = member
        self._deadlines = config.deadlines
        self._bucket_nbytes = min(config.bucket_nbytes, options.bucket_megabytes * 2**20)
        self._groups = OwnerGroups(
            member=member, config=config, options=options, communicator=GlooChain(options), stop=stop
        )
        self._bounce = torch.empty(0, dtype=torch.uint8)
        self._plan: SyncPlan | None = None

    def prepare(self, plan: SyncPlan) -> str:
        """Return the address of the ranks' store on rank 0, an empty string on the others."""
        self._plan = plan
        return self._groups.host_store() if self._member.index == 0 else ""

    def connect(self, topology: Topology) -> None:
        """Join the groups. Every rank calls it, even one with nothing to send or relay. Raises TransportError."""
        assert self._plan is not None  # the manager prepares every member first
        ranks = Topology(topology.trainers, (), topology.audience)
        messages = {
            trainer.index: messages_of(self._plan, trainer.index, self._bucket_nbytes)
            for trainer in topology.trainers
            if self._plan.pieces_of(trainer.index) and self._member.name in ranks.group_of(trainer.name)
        }
        self._groups.expect(self._plan, messages)
        self._bounce = bounce_for(messages)
        self._groups.connect(ranks)

    def exchange(self, version: int, slots: Sequence[SlotView]) -> int:
        """Send this rank's pieces to other hosts, and write the pieces that arrive into all `slots` of this host.

        This rank's pieces are in each of `slots`, of which there is at least one. Returns the bytes written. Raises
        TransportError; bytes that still arrive then land in slots that the arena replaces.
        """
        assert self._plan is not None
        plan, messages = self._plan, self._groups.messages
        first, *others = (slot.bytes for slot in slots)
        bounced = BounceBuffer(plan, self._bounce.numpy())
        deadline = Deadline(self._deadlines.stage_s * OWN_SHARE)

        def copy_to_others(bucket: Bucket) -> None:
            for other in others:
                if bucket.scatter:
                    bounced.scatter(bucket, other.numpy())
                else:
                    (message,) = bucket.ranges
                    part = slice(message.dst_offset, message.dst_offset + message.nbytes)
                    other[part].copy_(first[part])

        with self._groups.transfer(version):
            self._groups.exchange_headers(version, deadline)
            own = {bucket.ranges[0]: bucket for bucket in messages.get(self._member.index, ()) if bucket.scatter}
            reader = _SlotToSlot(self._groups, first, self._bounce, version, bounced=bounced, own=own)
            self._groups.fetch(reader, plan, deadline, messages, copy_to_others)
        received = (bucket for owner, buckets in messages.items() if owner != self._member.index for bucket in buckets)
        return len(slots) * sum(bucket.nbytes for bucket in received)

    def close(self) -> None:
        self._groups.release()


@dataclass
class _SlotToSlot(Broadcasts):
    """Both directions: a message lies at the same place of the slot at both ends.

    One loop drives them, in one order over all owners, so that ranks which wait for each other's messages never wait
    in a circle.
    """

    bounced: BounceBuffer
    own: dict[Range, Bucket]
    """Of the messages that this rank sends: those that are gathered first."""

    def start(self, owner: int, ranges: Sequence[Range], *, bounce: bool) -> tuple[int, Flight]:
        if bounce and self.groups.is_sender(owner):
            self.bounced.gather(self.own[ranges[0]], self.slot.numpy())
        return super().start(owner, ranges, bounce=bounce)
