"""In which pieces a checkpoint travels: how large they are, what is in each, in which order, and who pulls it. Pure."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

import msgspec

from ..errors import ConfigError, PlanError
from ..links.fetch import by_turns
from .records import PackedTensor, RankMetas

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class Bucket:
    """Neighbouring tensors in one host buffer of one rank, fetched as one range."""

    owner: int
    buffer: int
    """Number of the owner's buffer."""
    offset: int
    """Of the first byte in that buffer."""
    address: int
    """Of the first byte in the owner's process."""
    nbytes: int
    tensors: tuple[PackedTensor, ...]
    """Their offsets count from the bucket's first byte."""


@dataclass(frozen=True, kw_only=True)
class BucketSize:
    nbytes: int
    staged: bool
    """There is memory for a third bucket, so that the next one is fetched while one is broadcast and one loaded."""


def choose_bucket_size(
    usable_nbytes: Mapping[int, int], max_nbytes: Mapping[int, int], metas: Mapping[int, RankMetas]
) -> BucketSize:
    """The size on which all ranks agree: `usable_nbytes` and `max_nbytes` are by rank, of its device and as configured.

    A third of the least memory, or half of it without a staging bucket when a third does not hold the largest tensor.
    Never more than the largest host buffer. Raises ConfigError that names the tensor, and the rank that is short.
    """
    tensors = [tensor for meta in metas.values() for tensor in _tensors(meta)]
    if not tensors:
        return BucketSize(nbytes=1, staged=False)
    largest = max(tensors, key=lambda tensor: tensor.nbytes)
    longest = max((buffer.nbytes for meta in metas.values() for buffer in meta.buffers), default=0)
    short = min(usable_nbytes, key=lambda rank: usable_nbytes[rank])
    most = min(min(max_nbytes.values()), max(longest, 1))
    if most < largest.nbytes:
        strictest = min(max_nbytes, key=lambda rank: max_nbytes[rank])
        raise ConfigError(
            f"tensor {largest.name!r} has {largest.nbytes} bytes, more than a bucket of rank {strictest} ({most}): "
            f"set PS_MAX_BUCKET_SIZE_GB to at least {largest.nbytes / 2**30:.3f}"
        )
    for parts in (3, 2):
        nbytes = min(usable_nbytes[short] // parts, most)
        if nbytes >= largest.nbytes and nbytes > 0:
            return BucketSize(nbytes=nbytes, staged=parts == 3)
    raise ConfigError(
        f"tensor {largest.name!r} has {largest.nbytes} bytes, so two buckets need twice that, but rank {short} can use "
        f"{usable_nbytes[short]} bytes of its device: free memory, or raise mem_fraction"
    )


def largest_nbytes(metas: Iterable[RankMetas]) -> int:
    """Of the largest tensor; 0 if there is none."""
    return max((tensor.nbytes for meta in metas for tensor in _tensors(meta)), default=0)


def buckets_of(meta: RankMetas, bucket_nbytes: int) -> list[Bucket]:
    """All that a rank holds, in order, in buckets of at most `bucket_nbytes`, which no tensor exceeds."""
    return [
        _bucket(meta, number, tensors)
        for number, buffer in enumerate(meta.buffers)
        for tensors in _runs(buffer.tensors, bucket_nbytes)
    ]


def order_of(
    metas: Mapping[int, RankMetas], bucket_nbytes: int, receivers: Sequence[RankMetas] | None
) -> list[tuple[int, Bucket]]:
    """(rank that fetches and broadcasts, bucket), in the order in which all ranks take them.

    `receivers`: the ranks that pull from the owners; None: every owner broadcasts its own, owners by turns. Raises
    PlanError that lists tensors which several ranks hold.
    """
    _raise_if_twice(metas)
    owned = [(rank, bucket) for rank in sorted(metas) for bucket in buckets_of(metas[rank], bucket_nbytes)]
    if receivers is None:
        return list(by_turns(owned, lambda pair: pair[0]))
    owners = [meta for meta in metas.values() if meta.buffers]
    assigned = assign_receiver_ranks(owned, topology_of(receivers), topology_of(owners))
    return [(receiver, bucket) for receiver, _, bucket in assigned]


def _tensors(meta: RankMetas) -> Iterator[PackedTensor]:
    for buffer in meta.buffers:
        yield from buffer.tensors


def _raise_if_twice(metas: Mapping[int, RankMetas]) -> None:
    holders: dict[str, list[int]] = {}
    for rank, meta in metas.items():
        for tensor in _tensors(meta):
            holders.setdefault(tensor.name, []).append(rank)
    twice = [f"{name} (ranks {', '.join(map(str, ranks))})" for name, ranks in holders.items() if len(ranks) > 1]
    if twice:
        raise PlanError(f"tensors registered by several ranks: {'; '.join(twice)}")


def _runs(tensors: Sequence[PackedTensor], bucket_nbytes: int) -> Iterator[list[PackedTensor]]:
    run: list[PackedTensor] = []
    for tensor in sorted(tensors, key=lambda tensor: tensor.offset):
        if run and tensor.offset + tensor.nbytes - run[0].offset > bucket_nbytes:
            yield run
            run = []
        run.append(tensor)
    if run:
        yield run


def _bucket(meta: RankMetas, number: int, tensors: Sequence[PackedTensor]) -> Bucket:
    start = tensors[0].offset
    return Bucket(
        owner=meta.rank,
        buffer=number,
        offset=start,
        address=meta.buffers[number].address + start,
        nbytes=max(tensor.offset + tensor.nbytes for tensor in tensors) - start,
        tensors=tuple(msgspec.structs.replace(tensor, offset=tensor.offset - start) for tensor in tensors),
    )


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
