"""Who pulls which bucket from whom, so that every sender's and every receiver's network card is busy. Pure."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from typing import TypeVar

from ..errors import PlanError
from ..links.fetch import by_turns
from .records import RankMetas

T = TypeVar("T")


def topology_of(metas: Iterable[RankMetas]) -> dict[str, set[int]]:
    """The ranks behind each RDMA device. Devices of one name on two hosts are two devices."""
    topology: dict[str, set[int]] = {}
    for meta in sorted(metas, key=lambda meta: meta.rank):
        topology.setdefault(f"{meta.host}/{meta.rdma_device}", set()).add(meta.rank)
    return topology


def assign_receiver_ranks(
    buckets: list[tuple[int, T]], local_topo: Mapping[str, set[int]], remote_topo: Mapping[str, set[int]]
) -> list[tuple[int, int, T]]:
    """(owner rank, bucket) becomes (receiver rank, owner rank, bucket), in the order in which buckets are to travel.

    `local_topo`: RDMA device -> ranks that receive; its smallest rank pulls for them. `remote_topo`: device -> owners.
    The result is a sequence of rounds. In one round a receiver pulls at most one bucket and a sender's device serves
    at most one. Raises PlanError for an owner without a device, and if nobody can receive.
    """
    if not buckets:
        return []
    device_of = {rank: device for device, ranks in remote_topo.items() for rank in ranks}
    if unknown := sorted({owner for owner, _ in buckets} - device_of.keys()):
        raise PlanError(f"buckets of ranks {unknown}, which no sender's device serves: {dict(remote_topo)}")
    receivers = sorted(min(ranks) for ranks in local_topo.values() if ranks)[: len(remote_topo)]
    if not receivers:
        raise PlanError("there is no rank to receive buckets")
    waiting = deque(by_turns(buckets, lambda owned: device_of[owned[0]]))
    assigned: list[tuple[int, int, T]] = []
    while waiting:
        busy: set[str] = set()
        for receiver in receivers:
            if not waiting or device_of[waiting[0][0]] in busy:
                break
            owner, bucket = waiting.popleft()
            busy.add(device_of[owner])
            assigned.append((receiver, owner, bucket))
    return assigned
