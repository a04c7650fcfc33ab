"""Ranks that share rows of tokens: each holds some of them, and in attention some of the heads of all.

Everything in a layer but attention looks at one token. For attention a rank gives away its tokens of the others' heads
and gets the others' tokens of its own heads, and afterwards the other way round (DeepSpeed-Ulysses, arXiv:2309.14509).
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.distributed as dist


class Sharers:
    """The ranks that share rows, on one of them. Without a group it is a single rank and exchanges nothing."""

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        self.group = group
        self.size = 1 if group is None else dist.get_world_size(group)
        self.rank = 0 if group is None else dist.get_rank(group)

    def own(self, row: torch.Tensor) -> torch.Tensor:
        """This rank's columns of [1, n]; every rank has the same number."""
        return row.chunk(self.size, dim=1)[self.rank]

    def joined(self, values: torch.Tensor, before: int, total: int) -> torch.Tensor:
        """[total, ...] from this rank's values and those of the others, of which `before` precede them. A collective.

        Every rank goes on with all of them, in the same way: so each takes the gradients of its own.
        """
        if self.group is None:
            return values
        found: torch.Tensor = _Joined.apply(values, before, total, self.group)  # type: ignore[no-untyped-call]
        return found

    def copies(self, heads: int) -> int:
        """The fewest copies of each of `heads` heads with which every rank has the same number."""
        return self.size // math.gcd(self.size, heads)

    def heads_of_all(self, states: torch.Tensor) -> torch.Tensor:
        """[1, heads, tokens of this rank, d] -> [1, heads of this rank, tokens, d]. A collective."""
        if self.group is None:
            return states
        _, heads, tokens, width = states.shape
        parts = self._exchanged(states.reshape(self.size, heads // self.size, tokens, width))
        return parts.transpose(0, 1).reshape(1, heads // self.size, self.size * tokens, width)

    def tokens_of_all(self, states: torch.Tensor) -> torch.Tensor:
        """[1, tokens, heads of this rank, d] -> [1, tokens of this rank, heads, d]. A collective."""
        if self.group is None:
            return states
        _, tokens, heads, width = states.shape
        parts = self._exchanged(states.reshape(self.size, tokens // self.size, heads, width))
        return parts.transpose(0, 1).reshape(1, tokens // self.size, self.size * heads, width)

    def _exchanged(self, parts: torch.Tensor) -> torch.Tensor:
        exchanged: torch.Tensor = _Exchanged.apply(parts, self.group)  # type: ignore[no-untyped-call]
        return exchanged


class _Exchanged(torch.autograd.Function):
    """Part i goes to rank i, and what comes from rank i is part i; so do gradients."""

    @staticmethod
    def forward(ctx: Any, parts: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.group = group
        return _all_to_all(parts, group)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        return _all_to_all(gradients[0], ctx.group), None


class _Joined(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: torch.Tensor, before: int, total: int, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.own = slice(before, before + len(values))
        joined = values.new_zeros(total, *values.shape[1:])
        joined[ctx.own] = values
        dist.all_reduce(joined, group=group)
        return joined

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        return gradients[0][ctx.own], None, None, None


def _all_to_all(parts: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    received = torch.empty(parts.shape, dtype=parts.dtype, device=parts.device)
    dist.all_to_all_single(received, parts.contiguous(), group=group)
    return received
