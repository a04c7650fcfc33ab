"""Aggregate token losses into one number that does not depend on how the mini-batch is divided."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass

import torch

from verl.utils.config import ConfigError, did_you_mean
from verl.utils.torch_functional import masked_mean, masked_sum


@dataclass(frozen=True, slots=True, kw_only=True)
class LossTotals:
    """Denominators of a whole mini-batch: over all of its micro-batches on all data-parallel ranks.

    A rank takes `LossTotals.of` its part of the mini-batch and all-reduces (sums) both numbers before the first
    micro-batch.
    """

    num_tokens: float
    """Tokens with a loss."""
    num_sequences: float
    """Sequences, those without such a token among them, but for padding."""
    loss_scale_factor: float | None = None
    """The default divisor of `seq-mean-token-sum-norm`; None: the number of columns."""

    @classmethod
    def of(cls, loss_mask: torch.Tensor) -> LossTotals:
        """The totals of `loss_mask` [B, R] alone, of weights where it is no mask of zeros and ones. A sequence without
        a token counts as padding."""
        per_sequence = loss_mask.sum(-1)
        return cls(num_tokens=float(per_sequence.sum()), num_sequences=float((per_sequence > 0).sum()))

    def __add__(self, other: LossTotals) -> LossTotals:
        return LossTotals(
            num_tokens=self.num_tokens + other.num_tokens,
            num_sequences=self.num_sequences + other.num_sequences,
            loss_scale_factor=self.loss_scale_factor or other.loss_scale_factor,
        )


_of_mini_batch: ContextVar[LossTotals | None] = ContextVar("totals of the mini-batch", default=None)


@contextmanager
def within_mini_batch(totals: LossTotals) -> Iterator[None]:
    """In this block `agg_loss` without totals takes `totals`: losses written for verl do not pass any on."""
    token = _of_mini_batch.set(totals)
    try:
        yield
    finally:
        _of_mini_batch.reset(token)


def totals_in_force(loss_mask: torch.Tensor) -> LossTotals:
    """The totals of `within_mini_batch`; outside of such a block, those of `loss_mask` alone."""
    return _of_mini_batch.get() or LossTotals.of(loss_mask)


def agg_loss(
    loss_mat: torch.Tensor,
    loss_mask: torch.Tensor,
    loss_agg_mode: str,
    dp_size: int = 1,
    batch_num_tokens: float | None = None,
    global_batch_size: float | None = None,
    loss_scale_factor: float | None = None,
    *,
    totals: LossTotals | None = None,
) -> torch.Tensor:
    """This micro-batch's share of the mini-batch loss: loss_mat, loss_mask [B, R] -> scalar.

    The shares of all micro-batches on all ranks add up to the loss of the whole mini-batch, so gradients are summed
    over micro-batches and over ranks. FSDP averages over ranks instead: multiply the share by the number of ranks
    there. `totals` are those of the mini-batch; None means those of `within_mini_batch`, or that this is all of it.
    `batch_num_tokens` and `global_batch_size` are verl's names for them, where a loss knows better, and `dp_size` is a
    factor of the result. verl's losses hand on `config.global_batch_info`, which has none of them here.

    * `token-mean`: mean over all tokens (DAPO, arXiv:2503.14476).
    * `token-sum`: sum over all tokens.
    * `seq-mean-token-sum`: mean over sequences of the sum over their tokens.
    * `seq-mean-token-mean`: mean over sequences of the mean over their tokens (GRPO, arXiv:2402.03300).
    * `seq-mean-token-sum-norm`: mean over sequences of the sum over their tokens divided by R, or by
      `loss_scale_factor`: a constant (Dr. GRPO, arXiv:2503.20783).

    Raises ConfigError for another mode.
    """
    totals = totals or totals_in_force(loss_mask)
    num_tokens = (totals.num_tokens if batch_num_tokens is None else float(batch_num_tokens)) or 1.0
    num_sequences = (totals.num_sequences if global_batch_size is None else float(global_batch_size)) or 1.0
    if loss_agg_mode == "token-mean":
        return dp_size * masked_sum(loss_mat, loss_mask) / num_tokens
    if loss_agg_mode == "token-sum":
        return dp_size * masked_sum(loss_mat, loss_mask)
    if loss_agg_mode == "seq-mean-token-sum":
        return dp_size * masked_sum(loss_mat, loss_mask) / num_sequences
    if loss_agg_mode == "seq-mean-token-mean":
        return dp_size * masked_mean(loss_mat, loss_mask, axis=-1).sum() / num_sequences
    if loss_agg_mode == "seq-mean-token-sum-norm":
        scale = loss_scale_factor or totals.loss_scale_factor or loss_mask.shape[-1]
        return dp_size * masked_sum(loss_mat, loss_mask) / (num_sequences * scale)
    known = ("token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm")
    raise ConfigError(f"actor.loss_agg_mode={loss_agg_mode!r} is not known.{did_you_mean(loss_agg_mode, known)}")
