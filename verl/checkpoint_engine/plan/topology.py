"""Topologies: which member sends to which, as data. Pure functions of the members; every backend chooses one."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from ..errors import BackendUnavailable, PlanError
from .types import Member

MAX_LANES = 8
"""Lanes that the process groups of owners share; see `Lane`."""


@dataclass(frozen=True, slots=True)
class Topology:
    """`audience[sender]` are the names of the members that receive from the sender.

    A node with an audience forwards the version to it. If nodes forward, those in the audience of trainer ranks each
    read a share of the version from the ranks. Every node reads the rest from the one node whose audience it is in.
    """

    trainers: tuple[Member, ...]
    nodes: tuple[Member, ...]
    audience: dict[str, tuple[str, ...]]

    @property
    def receivers(self) -> tuple[str, ...]:
        """If nodes forward: the nodes that read from trainer ranks, each its share of a version."""
        return self.audience[self.trainers[0].name]

    def is_alone(self, node: str) -> bool:
        """If nodes forward: whether `node` neither serves another node nor reads from one."""
        return not self.audience.get(node) and self.before(node) is None

    def before(self, node: str) -> Member | None:
        """If nodes forward: the node from which `node` reads what it does not read from trainer ranks."""
        return next((other for other in self.nodes if node in self.audience.get(other.name, ())), None)

    @property
    def members(self) -> tuple[Member, ...]:
        return (*self.trainers, *self.nodes)

    @property
    def is_on_one_host(self) -> bool:
        """Compares names and addresses, because two hosts may have the same name."""
        return len({(member.host, member.host_addresses) for member in self.members}) == 1

    @property
    def host_addresses(self) -> tuple[str, ...]:
        """The addresses of all members' hosts; empty on one host, where members connect over loopback."""
        if self.is_on_one_host:
            return ()
        return tuple(sorted({address for member in self.members for address in member.host_addresses}))

    def group_of(self, sender: str) -> tuple[str, ...]:
        """The sender, as rank 0, and its audience: the ranks of its process group."""
        return (sender, *self.audience[sender])


def direct(trainers: Sequence[Member], nodes: Sequence[Member]) -> Topology:
    """Every rollout node receives every trainer rank's pieces from that rank."""
    everyone = tuple(node.name for node in nodes)
    return Topology(tuple(trainers), tuple(nodes), {trainer.name: everyone for trainer in trainers})


def broadcast(trainers: Sequence[Member], nodes: Sequence[Member]) -> Topology:
    """Every trainer rank broadcasts its own pieces to all rollout nodes, in a process group of its own.

    Raises PlanError if two members have the same name: a group finds its ranks by name.
    """
    members = Counter(member.name for member in (*trainers, *nodes))
    twice = [name for name, count in members.items() if count > 1]
    if twice:
        raise PlanError(f"members with the same name: {', '.join(twice)}")
    everyone = tuple(node.name for node in sorted(nodes, key=lambda node: node.index))
    return Topology(tuple(trainers), tuple(nodes), {trainer.name: everyone for trainer in trainers})


def across_hosts(trainers: Sequence[Member], nodes: Sequence[Member]) -> Topology:
    """For rollout nodes that share memory with trainer ranks of their host: `audience[rank]` are its relays elsewhere.

    A rank writes its own pieces into the slots of its host. To every other host it sends them once, to one rank there,
    which writes them into that host's slots. A host's k-th rank sends to the k-th rank of each other host (modulo their
    number), so that ranks of a host share the work. On one host all audiences are empty.

    Raises BackendUnavailable, naming the hosts, unless every host has both: no rank reaches rollout nodes on a host
    without trainer ranks, and a trainer rank without a node has no slot to send from.
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
    """Resources that process groups of several owners share, so that hundreds of groups fit into one process."""

    device: int | None
    """Groups with the same number share a listening socket and a thread that moves bytes. None: not shared."""
    threads: int
    """Threads that start operations: with two, the next bucket of an owner is under way while one ends."""


def lane_of(owner: int, *, num_owners: int) -> Lane:
    """The lane of the owner's group. All members of the group must compute the same one."""
    if num_owners <= MAX_LANES:
        return Lane(device=None, threads=2)
    return Lane(device=owner % MAX_LANES, threads=1)


def chain(trainers: Sequence[Member], nodes: Sequence[Member]) -> Topology:
    """Only the first rollout node reads from trainer ranks; every node serves the next one, by index.

    The network of the trainer's hosts carries each byte once, for any number of nodes.
    """
    ordered = sorted(nodes, key=lambda node: node.index)
    head = tuple(node.name for node in ordered[:1])
    audience = {trainer.name: head for trainer in trainers}
    audience |= {node.name: (after.name,) for node, after in pairwise(ordered)}
    return Topology(tuple(trainers), tuple(ordered), audience)


def tree(trainers: Sequence[Member], nodes: Sequence[Member]) -> Topology:
    """As `chain`, but every node serves up to two others: fewer hops, and twice the bytes out of each node."""
    ordered = sorted(nodes, key=lambda node: node.index)
    names = [node.name for node in ordered]
    audience = {trainer.name: tuple(names[:1]) for trainer in trainers}
    audience |= {name: tuple(names[2 * place + 1 : 2 * place + 3]) for place, name in enumerate(names)}
    return Topology(tuple(trainers), tuple(ordered), audience)


def p2p_broadcast(
    trainers: Sequence[Member], nodes: Sequence[Member], device_of: Mapping[str, str] | None = None
) -> Topology:
    """Designated receivers each pull a share of the version from the trainer ranks; all nodes forward it in a ring.

    The receivers are the first rollout nodes by index, as many as the trainer ranks have network devices. `device_of`
    maps the names of trainer ranks to devices; by default each rank has its own. A single node only pulls.
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
    """Choose one of a backend's `topologies` for members on these hosts, for `checkpoint_engine.topology=auto`.

    It is the first one by default. It is `chain`, if the backend has it, when more hosts have rollout nodes alone than
    have trainer ranks: otherwise the ranks' network would carry every byte several times.
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
"""The values of `checkpoint_engine.topology`."""
