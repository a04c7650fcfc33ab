"""The agreement of an update's ranks before bytes move: checkpoint, bucket size, and the rank that fetches each."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec
import xxhash

from ..errors import ConfigError
from .buckets import (
    Bucket,
    BucketSize,
    choose_bucket_size,
    largest_nbytes,
    order_of,
)
from .collective_calls import CollectiveCall
from .rank_device import Device
from .records import RankMetas


class _Proposal(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    mode: str
    metas: str
    """Digest of what this rank knows of the owners."""
    usable_nbytes: int
    max_bucket_nbytes: int
    receiver: RankMetas
    """Without buffers."""


def agree(
    together: CollectiveCall,
    *,
    name: str,
    device: Device,
    usable_nbytes: int,
    own: RankMetas,
    metas: Mapping[int, RankMetas],
    metas_name: str | None,
    p2p: bool,
) -> tuple[BucketSize, list[tuple[int, Bucket]]]:
    """Collective: the bucket size, and (rank that fetches and broadcasts, bucket) in order; the same on all ranks.

    `usable_nbytes`: memory for buckets on this rank's device. `own`: this rank's part of `name`. `metas`: the owners'
    records of checkpoint `metas_name`; None if they were loaded and may be of any checkpoint.

    Raises ConfigError if ranks differ or the metas do not fit, PlanError.
    """
    _check_metas(name, own, metas, metas_name, ranks=together.roster.ranks, p2p=p2p)
    proposal = _Proposal(
        name=name,
        mode="P2P" if p2p else "broadcast",
        metas=_digest(metas),
        usable_nbytes=usable_nbytes,
        max_bucket_nbytes=device.max_bucket_nbytes(largest_nbytes(metas.values())),
        receiver=msgspec.structs.replace(own, buffers=()),
    )
    answers = together.roster.exchange("planning", msgspec.to_builtins(proposal), together.deadline)
    proposals = {rank: msgspec.convert(answer, _Proposal) for rank, answer in answers.items()}
    raise_unless_same({rank: other.name for rank, other in proposals.items()}, "updates checkpoint")
    raise_unless_same({rank: other.mode for rank, other in proposals.items()}, "updates by")
    raise_unless_same({rank: other.metas for rank, other in proposals.items()}, "knows metas with digest")
    size = choose_bucket_size(
        {rank: other.usable_nbytes for rank, other in proposals.items()},
        {rank: other.max_bucket_nbytes for rank, other in proposals.items()},
        metas,
    )
    receivers = [other.receiver for other in proposals.values()]
    return size, order_of(metas, size.nbytes, receivers if p2p else None)


def raise_unless_same(by_rank: Mapping[int, Any], what: str) -> None:
    """Raises ConfigError naming two ranks whose values differ; `what` is the verb between rank and value."""
    first, *others = by_rank
    for rank in others:
        if by_rank[rank] != by_rank[first]:
            raise ConfigError(f"rank {first} {what} {by_rank[first]!r}, rank {rank} {by_rank[rank]!r}")


def _check_metas(
    name: str,
    own: RankMetas,
    metas: Mapping[int, RankMetas],
    metas_name: str | None,
    *,
    ranks: list[int],
    p2p: bool,
) -> None:
    if not metas:
        raise ConfigError(f"nothing is known of checkpoint {name!r}: call gather_metas, or load_metas, first")
    if metas_name is not None and metas_name != name:
        raise ConfigError(f"the metas are those of checkpoint {metas_name!r}: gather those of {name!r} first")
    if p2p:
        return
    absent = [rank for rank, meta in metas.items() if meta.buffers and rank not in ranks]
    held = metas[own.rank].incarnation if own.rank in metas else 0
    if absent or held != own.incarnation:
        raise ConfigError(
            f"a broadcast of {name!r} needs all its owners with the memory of the gathered metas, but "
            + (f"ranks {absent} are not among {ranks}" if absent else f"rank {own.rank} has other memory now")
            + ": gather again, or name the receiving ranks"
        )


def _digest(metas: Mapping[int, RankMetas]) -> str:
    return xxhash.xxh3_64_hexdigest(msgspec.msgpack.encode([metas[rank] for rank in sorted(metas)]))
