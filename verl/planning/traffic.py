"""The exact bytes between members, from the project's own plans and topologies, without moving any."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby, pairwise

import numpy as np

from verl.checkpoint_engine.links.cuts import part_nbytes_for, shares_of
from verl.checkpoint_engine.links.fetch import messages_of
from verl.checkpoint_engine.links.gloo_chain import SEGMENT_NBYTES
from verl.checkpoint_engine.links.holder import MOST_RECEIVERS
from verl.checkpoint_engine.plan.sync_plan import SyncPlan
from verl.checkpoint_engine.plan.topology import (
    TOPOLOGIES,
    Topology,
    across_hosts,
    broadcast,
    p2p_broadcast,
)
from verl.checkpoint_engine.plan.types import Member, Range
from verl.planning.job import Job

MESSAGE_NBYTES = 64 * 2**20
"""The bytes of one message of a backend, by default."""
WIRES = {"naive": "sockets", "gloo": "sockets", "tcp": "sockets", "nccl": "nccl", "hccl": "nccl"}
"""The wires of backends without a choice."""
COLLECTIVES = ("naive", "gloo", "nccl", "hccl")


@dataclass(frozen=True, slots=True, kw_only=True)
class Transfer:
    """The bytes from one member to another in one full sync."""

    sender: Member
    receiver: Member
    nbytes: int
    messages: int


@dataclass(frozen=True, kw_only=True)
class Way:
    """A backend with a topology, for one plan."""

    backend: str
    topology: str
    transfers: tuple[Transfer, ...]
    hops: dict[str, int]
    """By receiving member: the number of members that forward its last byte."""
    part_nbytes: int
    """The bytes of a forwarded part."""
    sent_nbytes: dict[str, int]
    """By member: the bytes that it sends."""

    @property
    def name(self) -> str:
        return f"{self.backend}, {self.topology}"


def members_of(job: Job) -> tuple[list[Member], list[Member]]:
    """Trainer ranks and rollout nodes: one node on each host of rollouts."""
    trainers = [
        Member(role="trainer", index=rank, host=f"host-{job.trainer_host(rank)}") for rank in range(job.trainers.ranks)
    ]
    nodes = [Member(role="node", index=node, host=f"host-{job.node_host(node)}") for node in range(job.rollouts.count)]
    return trainers, nodes


class Traffic:
    """The ways of one plan. Computes the owners' messages once per size."""

    def __init__(self, plan: SyncPlan, job: Job) -> None:
        self._plan = plan
        self._trainers, self._nodes = members_of(job)
        self._owned = plan.owner_nbytes
        self._messages: dict[int, list[int]] = {}
        self._known: dict[tuple[bool, bool, str], Way] = {}

    def way(self, backend: str, topology: str) -> Way:
        """The way of a backend with a topology. Ways with the same bytes share their transfers.

        Raises BackendUnavailable or PlanError if the backend cannot serve these members.
        """
        key = (backend == "naive", backend == "kimi_ckpt_engine", topology)
        if key not in self._known:
            self._known[key] = self._made(backend, topology)
        return replace(self._known[key], backend=backend)

    def _made(self, backend: str, topology: str) -> Way:
        if backend in COLLECTIVES:
            made = across_hosts if backend == "naive" else broadcast
            built = made(self._trainers, self._nodes)
            transfers = tuple(self._along_groups(built))
            hops = {name: place for group in _groups(built) for place, name in enumerate(group[1:])}
            part_nbytes = SEGMENT_NBYTES
        elif topology == "direct":
            transfers = tuple(self._from_owners(MESSAGE_NBYTES))
            hops, part_nbytes = {node.name: 0 for node in self._nodes}, MESSAGE_NBYTES
        else:
            part_nbytes = part_nbytes_for(self._plan.layout.nbytes, MESSAGE_NBYTES)
            built = self._topology(backend, topology)
            before = {node.name: built.before(node.name) for node in built.nodes}
            transfers = tuple(self._passed_on(built, before, part_nbytes))
            hops = {node.name: _hops(before, node.name) for node in self._nodes}
        return Way(
            backend=backend,
            topology=topology,
            transfers=transfers,
            hops=hops,
            part_nbytes=part_nbytes,
            sent_nbytes=_sent_nbytes(transfers),
        )

    def _topology(self, backend: str, name: str) -> Topology:
        if backend == "kimi_ckpt_engine":  # ranks of a host share its network device
            return p2p_broadcast(self._trainers, self._nodes, {rank.name: rank.host for rank in self._trainers})
        return TOPOLOGIES[name](self._trainers, self._nodes)

    def _from_owners(self, most_nbytes: int) -> Iterator[Transfer]:
        for trainer in self._trainers:
            if nbytes := self._owned[trainer.index]:
                messages = self._count(trainer.index, most_nbytes)
                for node in self._nodes:
                    yield Transfer(sender=trainer, receiver=node, nbytes=nbytes, messages=messages)

    def _along_groups(self, topology: Topology) -> Iterator[Transfer]:
        """From member to member of each owner's group."""
        by_name = {member.name: member for member in topology.members}
        for group in _groups(topology):
            owner = by_name[group[0]].index
            if nbytes := self._owned[owner]:
                messages = self._count(owner, MESSAGE_NBYTES)
                for sender, receiver in pairwise(by_name[name] for name in group):
                    yield Transfer(sender=sender, receiver=receiver, nbytes=nbytes, messages=messages)

    def _passed_on(
        self, topology: Topology, before: Mapping[str, Member | None], part_nbytes: int
    ) -> Iterator[Transfer]:
        plan, receivers = self._plan, topology.receivers[:MOST_RECEIVERS]
        shares = shares_of(plan, len(receivers)) if len(receivers) > 1 else []
        read = self._read(shares)
        by_name = {node.name: node for node in topology.nodes}
        for trainer in topology.trainers:
            count, owned = self._count(trainer.index, part_nbytes), self._owned[trainer.index]
            for name, nbytes in zip(receivers, read[trainer.index], strict=True):
                if nbytes:
                    part = max(round(count * nbytes / owned), 1)
                    yield Transfer(sender=trainer, receiver=by_name[name], nbytes=nbytes, messages=part)
        for node in topology.nodes:
            upstream = before[node.name]
            if upstream is None:
                continue
            nbytes = plan.layout.nbytes
            if node.name in receivers:
                nbytes -= shares[receivers.index(node.name)].nbytes
            yield Transfer(sender=upstream, receiver=node, nbytes=nbytes, messages=-(-nbytes // part_nbytes))

    def _read(self, shares: Sequence[Range]) -> list[list[int]]:
        """[owners, shares]: the bytes of each owner's pieces in each share; without shares, one column of all."""
        if not shares:
            return [[nbytes] for nbytes in self._owned]
        starts = np.array([share.dst_offset for share in shares], np.int64)
        extents, count = self._plan.extents, len(shares)
        share = np.searchsorted(starts, extents.offset, side="right") - 1
        owner = np.repeat(np.arange(self._plan.num_owners), np.diff(self._plan.first))
        sums = np.bincount(owner * count + share, extents.nbytes, self._plan.num_owners * count)
        read: list[list[int]] = sums.astype(np.int64).reshape(-1, count).tolist()
        return read

    def _count(self, owner: int, most_nbytes: int) -> int:
        if most_nbytes not in self._messages:
            owners = range(self._plan.num_owners)
            self._messages[most_nbytes] = [len(messages_of(self._plan, one, most_nbytes)) for one in owners]
        return self._messages[most_nbytes][owner]


def _hops(before: Mapping[str, Member | None], node: str) -> int:
    """Over how many nodes the last part comes: round a ring, or from the head of a chain or tree."""
    seen = {node}
    while (upstream := before[node]) is not None and upstream.name not in seen:
        node = upstream.name
        seen.add(node)
    return len(seen) - 1


def _sent_nbytes(transfers: Sequence[Transfer]) -> dict[str, int]:
    sums: dict[str, int] = {}
    for sender, group in groupby(transfers, key=lambda one: one.sender):
        sums[sender.name] = sums.get(sender.name, 0) + sum(one.nbytes for one in group)
    return sums


def wire_of(backend: str, *, rdma: bool) -> str:
    """`sockets`, `rdma` or `nccl`. With `rdma`, libraries that support it use it."""
    return WIRES.get(backend, "rdma" if rdma else "sockets")


def _groups(topology: Topology) -> Iterator[tuple[str, ...]]:
    return (topology.group_of(trainer.name) for trainer in topology.trainers)
