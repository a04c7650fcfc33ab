"""Who sends to whom, as data. Pure functions of the members; every backend picks one."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from ..errors import BackendUnavailable, PlanError
from .types import Member

MAX_LANES = 8
"""Owners from which a node receives at the same time."""


@dataclass(frozen=True, slots=True)
class Topology:
    """`audience[sender]` are the names of the members that receive the sender's pieces.

    Nodes that have an audience pass a version on. Those to which trainer ranks send divide the version among
    themselves, and each node gets the rest from the one node whose audience it is in.
    """

    trainers: tuple[Member, ...]
    nodes: tuple[Member, ...]
    audience: dict[str, tuple[str, ...]]

    @property
    def receivers(self) -> tuple[str, ...]:
        """Where nodes pass a version on: those that read from trainer ranks, each its part of a version."""
        return self.audience[self.trainers[0].name]

    def is_alone(self, node: str) -> bool:
        """Where nodes pass a version on: whether `node` neither serves another node nor reads from one."""
        return not self.audience.get(node) and self.before(node) is None

    def before(self, node: str) -> Member | None:
        """Where nodes pass a version on: from whom `node` reads what it does not get from trainer ranks."""
        return next((other for other in self.nodes if node in self.audience.get(other.name, ())), None)

    @property
    def members(self) -> tuple[Member, ...]:
        return (*self.trainers, *self.nodes)

    @property
    def is_on_one_host(self) -> bool:
        """Hosts may have the same name and be two."""
        return len({(member.host, member.host_addresses) for member in self.members}) == 1

    @property
    def host_addresses(self) -> tuple[str, ...]:
        """Of all members' hosts; none where they share one, whose members talk to each other inside of it."""
        if self.is_on_one_host:
            return ()
        return tuple(sorted({address for member in self.members for address in member.host_addresses}))

    def group_of(self, sender: str) -> tuple[str, ...]:
        """The sender and its audience, as ranks of one process group: the sender is rank 0."""
        return (sender, *self.audience[sender])


def direct(trainers: Sequence[Member], nodes: Sequence[Member]) -> Topology:
    """Every trainer rank's pieces go straight to every rollout node."""
    everyone = tuple(node.name for node in nodes)
    return Topology(tuple(trainers), tuple(nodes), {trainer.name: everyone for trainer in trainers})


def broadcast(trainers: Sequence[Member], nodes: Sequence[Member]) -> Topology:
    """Every trainer rank broadcasts its own pieces to all rollout nodes, in a group of its own. There is no funnel.

    Raises PlanError if a name is there twice: ranks of a group are found by name.
    """
    members = Counter(member.name for member in (*trainers, *nodes))
    twice = [name for name, count in members.items() if count > 1]
    if twice:
        raise PlanError(f"members with the same name: {', '.join(twice)}")
    everyone = tuple(node.name for node in sorted(nodes, key=lambda node: node.index))
    return Topology(tuple(trainers), tuple(nodes), {trainer.name: everyone for trainer in trainers})


def across_hosts(trainers: Sequence[Member], nodes: Sequence[Member]) -> Topology:
    """For rollout nodes that share their hosts, and memory, with trainer ranks: who relays whose pieces to which host.

    A rank writes its own pieces into the slots of its host. To every other host it sends them once, to one rank there,
    which writes them into that host's slots. A host's k-th rank sends to the k-th rank of each other host (modulo their
    number), so that ranks of a host share the work. On one host nobody has an audience.

    Raises BackendUnavailable, naming the hosts, unless every host has both: rollout nodes without a trainer rank are
    out of reach, and a trainer rank without a node has no slot to send from.
    """
    ranks: dict[str, list[Member]] = {}
    for trainer in sorted(trainers, key=lambda member: member.index):
        ranks.setdefault(trainer.host, []).append(trainer)
    hosts = {node.host for node in nodes}
    if lonely := sorted(hosts ^ ranks.keys()):
        raise BackendUnavailable(
            "checkpoint_engine.backend=naive needs a trainer rank and a rollout node on each host; these have only one "
            f"of them: {', '.join(lonely)}. Choose a backend that crosses hosts"
        )
    audience = {
        trainer.name: tuple(there[place % len(there)].name for other, there in ranks.items() if other != host)
        for host, here in ranks.items()
        for place, trainer in enumerate(here)
    }
    return Topology(tuple(trainers), tuple(nodes), {trainer.name: audience[trainer.name] for trainer in trainers})


@dataclass(frozen=True, slots=True, kw_only=True)
class Lane:
    """What the process group of one owner shares with those of other owners, so that hundreds fit into one process."""

    device: int | None
    """Groups with the same number share a listening socket and a thread that moves bytes; None: one of its own."""
    threads: int
    """That start operations: with two, the next bucket of an owner is under way while one ends."""


def lane_of(owner: int, *, num_owners: int) -> Lane:
    """The lane of the owner's group: the same on each of its members, which have to agree."""
    if num_owners <= MAX_LANES:
        return Lane(device=None, threads=2)
    return Lane(device=owner % MAX_LANES, threads=1)


def chain(trainers: Sequence[Member], nodes: Sequence[Member]) -> Topology:
    """Every trainer rank's pieces go to the first rollout node only; every node serves the next one, by index.

    A trainer's network carries each byte once, however many nodes there are.
    """
    ordered = sorted(nodes, key=lambda node: node.index)
    head = tuple(node.name for node in ordered[:1])
    audience = {trainer.name: head for trainer in trainers}
    audience |= {node.name: (after.name,) for node, after in pairwise(ordered)}
    return Topology(tuple(trainers), tuple(ordered), audience)


def tree(trainers: Sequence[Member], nodes: Sequence[Member]) -> Topology:
    """As `chain`, but every node serves two others: fewer hops for many nodes, and twice the bytes out of each."""
    ordered = sorted(nodes, key=lambda node: node.index)
    names = [node.name for node in ordered]
    audience = {trainer.name: tuple(names[:1]) for trainer in trainers}
    audience |= {name: tuple(names[2 * place + 1 : 2 * place + 3]) for place, name in enumerate(names)}
    return Topology(tuple(trainers), tuple(ordered), audience)


def p2p_broadcast(
    trainers: Sequence[Member], nodes: Sequence[Member], device_of: Mapping[str, str] | None = None
) -> Topology:
    """Designated receivers pull a version from the trainer ranks, each another part of it, and pass it on in a ring.

    A receiver is a rollout node; the first ones are, by index, as many as there are network devices to pull from.
    `device_of` names those of trainer ranks; by default each has one of its own. A single node only pulls.
    """
    ordered = sorted(nodes, key=lambda node: node.index)
    devices = {(device_of or {}).get(trainer.name, trainer.name) for trainer in trainers}
    receivers = tuple(node.name for node in ordered[: len(devices)])
    audience = {trainer.name: receivers for trainer in trainers}
    audience |= {node.name: (after.name,) for node, after in pairwise(ordered)}
    if len(receivers) > 1:
        audience[ordered[-1].name] = (ordered[0].name,)
    return Topology(tuple(trainers), tuple(ordered), audience)


def best_of(topologies: Sequence[str], *, trainer_hosts: Collection[str], node_hosts: Collection[str]) -> str:
    """The one of a backend's `topologies` for members on these hosts: the meaning of `checkpoint_engine.topology=auto`.

    By default the first. If rollout nodes are on more other hosts than trainer ranks are on, the ranks' network would
    carry every byte several times. Then it is a chain, if the backend has one.
    """
    elsewhere = set(node_hosts) - set(trainer_hosts)
    return "chain" if "chain" in topologies and len(elsewhere) > len(set(trainer_hosts)) else topologies[0]


TOPOLOGIES: dict[str, Callable[[Sequence[Member], Sequence[Member]], Topology]] = {
    "direct": direct,
    "broadcast": broadcast,
    "chain": chain,
    "tree": tree,
    "p2p_broadcast": p2p_broadcast,
}
"""By the name under which `checkpoint_engine.topology` asks for them."""
