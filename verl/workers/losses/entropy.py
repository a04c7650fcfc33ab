"""The entropy of a policy as a term of a loss."""

from __future__ import annotations

import torch

from verl.utils.torch_functional import entropy_from_logits
from verl.workers.losses.aggregation import agg_loss


def compute_entropy_loss(
    logits: torch.Tensor, response_mask: torch.Tensor, loss_agg_mode: str = "token-mean"
) -> torch.Tensor:
    """The entropy of `logits` [B, R, V] over the tokens of `response_mask` [B, R], aggregated as losses are."""
    return agg_loss(entropy_from_logits(logits), response_mask, loss_agg_mode)
