"""The seconds of each phase of a sync for every way, their bounds, and remedies, with the formulas of `cost.py`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

from verl.checkpoint_engine.plan.sync_plan import SyncPlan
from verl.planning import cost
from verl.planning.cost import Flow, Rates
from verl.planning.hardware import Hardware, faster
from verl.planning.job import Fabric, Job
from verl.planning.memory import engine_rank_nbytes
from verl.planning.traffic import Way, wire_of

TIMED = ("publish", "stage", "verify", "commit", "activate", "resume")
HELPS = {
    "wire_share": "links of twice the rate",
    "process": "processes that send and receive twice as fast",
    "copy": "twice as many cores, or memory, for publishing",
    "digest": "twice as many cores for digests",
    "apply": "twice as many cores for applying deltas",
    "to_host": "twice the rate between trainer devices and their hosts",
    "load": "engines that load twice as fast",
    "tensor_s": "engines that take half as long for each tensor",
    "member_s": "calls that take half as long for each member",
    "message_s": "messages that take half as long each",
}
WORTH = 0.02
"""The share of the total that twice a rate must save to be listed."""


@dataclass(frozen=True, kw_only=True)
class Seconds:
    """The seconds of one sync at given rates."""

    phases: dict[str, float]
    bound: str
    """The busiest resource of the stage."""

    @property
    def total(self) -> float:
        return sum(self.phases.values())


@dataclass(frozen=True, kw_only=True)
class Forecast:
    way: Way
    delta: bool
    fast: Seconds
    slow: Seconds
    helps: tuple[tuple[str, float], ...]
    """The savings in the slower total by remedy, the largest first."""

    @property
    def bound(self) -> str:
        """The longest phase, and for the stage its busiest resource."""
        phase = max(self.slow.phases, key=lambda name: self.slow.phases[name])
        return f"{phase}: {self.slow.bound}" if phase == "stage" else phase


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """The sizes of one version, in bytes unless noted."""

    version: int
    largest_rank: int
    """The most bytes that a rank publishes."""
    engine_rank: int
    words: int
    tensors: int

    @classmethod
    def of(cls, plan: SyncPlan, job: Job) -> Sizes:
        return cls(
            version=plan.layout.payload_nbytes,
            largest_rank=max(plan.owner_nbytes, default=0),
            engine_rank=engine_rank_nbytes(plan.layout, job.rollout_tp),
            words=max(sum(spec.numel for spec in plan.layout.specs), 1),
            tensors=len(plan.layout.specs),
        )

    @property
    def word(self) -> float:
        return self.version / self.words


@dataclass(frozen=True, kw_only=True, eq=False)
class Road:
    """The properties of a way that determine a stage at any rates. Compared by identity."""

    flows: tuple[Flow, ...]
    """The flows of a full sync; transfers over the same resources are one flow."""
    hops: int
    part_nbytes: int
    messages: int
    """The most messages that a node handles."""
    arrived: int
    """The most bytes that a node receives."""

    @classmethod
    def of(cls, way: Way, job: Job, *, shared_cores: bool = False) -> Road:
        """With `shared_cores`, hosts are namespaces of one machine."""
        found: dict[tuple[str, str, str, str], list[int]] = {}
        messages, arrived = Counter[tuple[str, int]](), Counter[tuple[str, int]]()
        for one in way.transfers:
            sender, receiver = one.sender, one.receiver
            flow = found.setdefault((sender.role, sender.host, receiver.role, receiver.host), [0, 0])
            flow[0] += one.nbytes
            flow[1] += 1
            messages[receiver.role, receiver.index] += one.messages
            arrived[receiver.role, receiver.index] += one.nbytes
        return cls(
            flows=tuple(
                Flow(nbytes=nbytes, resources=tuple(_resources(*ends, job, shared_cores)), connections=count)
                for ends, (nbytes, count) in found.items()
            ),
            hops=max(way.hops.values(), default=0),
            part_nbytes=way.part_nbytes,
            messages=max(messages.values(), default=0),
            arrived=max(arrived.values(), default=0),
        )


def forecast(
    way: Way, road: Road, sizes: Sizes, job: Job, hardware: Hardware, *, delta: bool, rdma: bool, device: bool
) -> Forecast:
    """The forecast for `way`, whose `road` is given."""
    slow, fast = hardware.rates(wire_of(way.backend, rdma=rdma), device=device)
    slowest = seconds(road, sizes, job, slow, delta=delta)
    saved = {
        words: slowest.total - seconds(road, sizes, job, faster(slow, name, 2.0), delta=delta).total
        for name, words in HELPS.items()
    }
    worth = [(words, gain) for words, gain in saved.items() if gain > WORTH * slowest.total]
    return Forecast(
        way=way,
        delta=delta,
        slow=slowest,
        fast=seconds(road, sizes, job, fast, delta=delta),
        helps=tuple(sorted(worth, key=lambda one: -one[1])),
    )


def seconds(road: Road, sizes: Sizes, job: Job, rates: Rates, *, delta: bool) -> Seconds:
    """The seconds of one sync; with `delta`, of one that moves the changes."""
    fraction = job.changed if delta and job.changed is not None else 1.0
    stage, bound = stage_s(road, job, rates, cost.moved_part(fraction, sizes.word) if delta else 1.0)
    if delta:
        stage += cost.apply_s(sizes.version, fraction, sizes.word, rates)
        publish = cost.publish_delta_s(sizes.largest_rank, fraction, sizes.word, rates)
    else:
        publish = cost.publish_s(sizes.largest_rank, rates)
    ranks, nodes = cost.calls_s(job.trainers.ranks, rates), cost.calls_s(job.rollouts.count, rates)
    replicas = cost.calls_s(job.replicas, rates)
    phases = {
        "publish": publish + ranks,
        "stage": stage + nodes,
        "verify": (0.0 if delta else cost.verify_s(sizes.version, rates)) + nodes,
        "commit": nodes,
        "activate": cost.activate_s(sizes.engine_rank, sizes.tensors, rates) + replicas,
        "resume": replicas,
    }
    return Seconds(phases=phases, bound=bound)


def stage_s(
    road: Road, job: Job, rates: Rates, part: float = 1.0, cores_bytes_per_s: float | None = None
) -> tuple[float, str]:
    """Seconds until the last node has every byte, and the busiest resource. `part` is the moved fraction of the bytes.

    `cores_bytes_per_s` is the rate through sockets of the processors that all hosts share, if hosts are namespaces.
    """
    if not road.flows:
        return 0.0, "nothing travels"
    last, bound = _drained(road, job, rates.wire_share, rates.process, cores_bytes_per_s)
    last, arrived = last * part, road.arrived * part
    behind = cost.pipeline_s(road.hops, min(road.part_nbytes, arrived), arrived / last, rates) if last else 0.0
    handled = road.messages * part * rates.message_s
    return max(last, handled) + behind, "messages" if handled > last else bound


@lru_cache(maxsize=4096)
def _drained(
    road: Road, job: Job, wire_share: float, process: float, cores_bytes_per_s: float | None
) -> tuple[float, str]:
    """In full. Of a part of the bytes it is that part of the seconds; most rates are for other phases."""
    capacity = _capacities(job, wire_share, process, cores_bytes_per_s)
    return float(cost.drained(road.flows, capacity).max()), _fullest(road.flows, capacity, job)


def _capacities(job: Job, wire_share: float, process: float, cores_bytes_per_s: float | None) -> dict[Hashable, float]:
    """Bytes per second of whatever transfers may share."""
    fabric: Fabric = job.fabric
    link = fabric.host_bytes_per_s * wire_share
    capacity: dict[Hashable, float] = {}
    for host in range(job.hosts):
        capacity["out", host] = capacity["in", host] = link
        capacity["ranks send", host] = process * job.trainers.each
        capacity["ranks receive", host] = process * job.trainers.each
        capacity["node sends", host] = capacity["node receives", host] = process
    if fabric.hosts_per_leaf:
        for leaf in range(-(-job.hosts // fabric.hosts_per_leaf)):
            others = link * fabric.hosts_per_leaf / fabric.oversubscription
            capacity["up", leaf] = capacity["down", leaf] = others
    if cores_bytes_per_s is not None:
        capacity["cores", 0] = cores_bytes_per_s
    return capacity


def _resources(
    sender_role: str, sender_host: str, receiver_role: str, receiver_host: str, job: Job, shared_cores: bool
) -> Iterator[Hashable]:
    sender, receiver = (int(host.removeprefix("host-")) for host in (sender_host, receiver_host))
    yield ("ranks send" if sender_role == "trainer" else "node sends"), sender
    yield ("ranks receive" if receiver_role == "trainer" else "node receives"), receiver
    if shared_cores:
        yield "cores", 0
    if sender == receiver:
        return
    yield "out", sender
    yield "in", receiver
    leaf = job.fabric.hosts_per_leaf
    if leaf and sender // leaf != receiver // leaf:
        yield "up", sender // leaf
        yield "down", receiver // leaf


SAID = {
    "out": "link out of a {}",
    "in": "link into a {}",
    "ranks send": "trainer processes, sending",
    "ranks receive": "trainer processes, receiving",
    "node sends": "node's process, sending",
    "node receives": "node's process, receiving",
    "up": "links between switches",
    "down": "links between switches",
    "cores": "shared processors",
}
"""The texts for busiest resources."""


def _fullest(flows: Sequence[Flow], capacity: Mapping[Hashable, float], job: Job) -> str:
    busy: dict[Hashable, float] = {}
    for flow in flows:
        for name in flow.resources:
            busy[name] = busy.get(name, 0.0) + flow.nbytes
    name = max(busy, key=lambda one: busy[one] / capacity[one])
    assert isinstance(name, tuple)
    kind, place = name
    host = "host" if job.colocated else "trainer host" if place < job.trainers.count else "rollout host"
    return SAID[kind].format(host)
