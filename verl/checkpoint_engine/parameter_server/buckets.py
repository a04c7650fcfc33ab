"""The buckets in which a checkpoint travels: their size, content and order, and the rank that pulls each. Pure."""

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
    """The index of the owner's buffer."""
    offset: int
    """The offset of the first byte in that buffer."""
    address: int
    """The address of the first byte in the owner's process."""
    nbytes: int
    tensors: tuple[PackedTensor, ...]
    """The tensors, with offsets from the bucket's first byte."""


@dataclass(frozen=True, kw_only=True)
class BucketSize:
    nbytes: int
    staged: bool
    """Whether memory suffices for a third bucket: to fetch one while another is broadcast and a third is loaded."""


def choose_bucket_size(
    usable_nbytes: Mapping[int, int], max_nbytes: Mapping[int, int], metas: Mapping[int, RankMetas]
) -> BucketSize:
    """The bucket size for all ranks. By rank: `usable_nbytes` of device memory, `max_nbytes` by configuration.

    It is a third of the least memory, or half of it if a third does not hold the largest tensor. It is at most the
    largest host buffer. Raises ConfigError naming the tensor that fits in no bucket, and the rank with the limit.
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
    """Bytes of the largest tensor; 0 if there is none."""
    return max((tensor.nbytes for meta in metas for tensor in _tensors(meta)), default=0)


def buckets_of(meta: RankMetas, bucket_nbytes: int) -> list[Bucket]:
    """All tensors of a rank, in order, in buckets of at most `bucket_nbytes`. No tensor may be larger."""
    return [
        _bucket(meta, number, tensors)
        for number, buffer in enumerate(meta.buffers)
        for tensors in _runs(buffer.tensors, bucket_nbytes)
    ]


def order_of(
    metas: Mapping[int, RankMetas], bucket_nbytes: int, receivers: Sequence[RankMetas] | None
) -> list[tuple[int, Bucket]]:
    """(rank that fetches and broadcasts, bucket), in the order that all ranks follow.

    `receivers`: the ranks that pull from the owners; None: every owner broadcasts its own buckets, owners by turns.
    Raises PlanError listing tensors that several ranks hold.
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
    """The ranks of each RDMA device, by `host/device`."""
    topology: dict[str, set[int]] = {}
    for meta in sorted(metas, key=lambda meta: meta.rank):
        topology.setdefault(f"{meta.host}/{meta.rdma_device}", set()).add(meta.rank)
    return topology


def assign_receiver_ranks(
    buckets: list[tuple[int, T]], local_topo: Mapping[str, set[int]], remote_topo: Mapping[str, set[int]]
) -> list[tuple[int, int, T]]:
    """Assign a receiver to each (owner rank, bucket): (receiver rank, owner rank, bucket), in transfer order.

    `local_topo`: RDMA device to receiving ranks, of which the smallest pulls. `remote_topo`: device to owners. The
    result is a sequence of rounds. In a round a receiver pulls at most one bucket, and a sender's device serves at most
    one. Raises PlanError for an owner without a device, and without a receiver.
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
