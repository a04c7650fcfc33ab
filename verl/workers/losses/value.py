"""The critic's loss."""

from __future__ import annotations

import torch

from verl.utils.torch_functional import masked_sum
from verl.workers.losses.aggregation import LossTotals, agg_loss, totals_in_force


def compute_value_loss(
    vpreds: torch.Tensor,
    returns: torch.Tensor,
    values: torch.Tensor,
    response_mask: torch.Tensor,
    cliprange_value: float,
    loss_agg_mode: str = "token-mean",
    *,
    totals: LossTotals | None = None,
) -> tuple[torch.Tensor, dict[str, float]]:
    """Half the squared error, of the value or of the value kept near the old one, whichever is worse (PPO).

    All tensors are [B, R]; `values` are those before the update. Loss and metrics are shares of the mini-batch's, as
    those of policy losses are.
    """
    of_all = totals or totals_in_force(response_mask)
    near = torch.clamp(vpreds, values - cliprange_value, values + cliprange_value)
    free_error, near_error = (vpreds - returns) ** 2, (near - returns) ** 2
    token_losses = 0.5 * torch.maximum(free_error, near_error)

    def share(numbers: torch.Tensor) -> float:
        return masked_sum(numbers.detach().float(), response_mask).item() / max(of_all.num_tokens, 1.0)

    metrics = {"critic/vf_clipfrac": share(near_error > free_error), "critic/vpred_mean": share(vpreds)}
    return agg_loss(token_losses, response_mask, loss_agg_mode, totals=of_all), metrics
