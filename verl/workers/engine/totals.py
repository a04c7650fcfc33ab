"""Sums over all trainer ranks that every engine needs. Collectives of the default group, on CPU tensors."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import Any

import torch
import torch.distributed as dist

from verl.protocol import PADDING, DataProto, tensors_of
from verl.workers.losses import LossTotals


def global_totals(data: DataProto) -> LossTotals:
    """The totals of the mini-batch of which `data` is this rank's part.

    As in verl, sequences without a token of the policy (rejected, or aborted at once) count; padding does not.
    """
    num_tokens = LossTotals.of(tensors_of(data)["response_mask"]).num_tokens
    is_padding = data.non_tensor_batch.get(PADDING)
    num_padding = 0 if is_padding is None else int(is_padding.astype(bool).sum())
    totals = torch.tensor([num_tokens, len(data) - num_padding], dtype=torch.float64)
    dist.all_reduce(totals)
    return LossTotals(num_tokens=float(totals[0]), num_sequences=float(totals[1]))


def sums_of(shares: Iterable[Mapping[str, float | torch.Tensor]]) -> dict[str, float]:
    """Each metric's sum over the micro-batches of this rank.

    All tensors are copied to the host at once, at the end, because every copy waits for the device.
    """
    sums: dict[str, float] = {}
    alike: defaultdict[Any, list[tuple[str, torch.Tensor]]] = defaultdict(list)
    for share in shares:
        for name, value in share.items():
            sums.setdefault(name, 0.0)
            if isinstance(value, torch.Tensor):
                alike[value.device, value.dtype].append((name, value.detach().reshape(())))
            else:
                sums[name] += float(value)
    for named in alike.values():
        copied = torch.stack([value for _, value in named]).tolist()
        for (name, _), number in zip(named, copied, strict=True):
            sums[name] += number
    return sums


def sum_over_ranks(values: Mapping[str, float], group: dist.ProcessGroup | None = None) -> dict[str, float]:
    """Sum each value over all ranks, which have the same names."""
    names = sorted(values)
    sums = torch.tensor([values[name] for name in names], dtype=torch.float64)
    dist.all_reduce(sums, group=group)
    return dict(zip(names, sums.tolist(), strict=True))


def largest_count(count: int) -> int:
    """The largest count of any rank: all must make as many passes as the rank that needs most."""
    counts = torch.tensor(count)
    dist.all_reduce(counts, dist.ReduceOp.MAX)
    return int(counts)
