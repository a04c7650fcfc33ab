"""Policy losses, by the name that `actor.policy_loss.loss_mode` gives them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch

from verl.checkpoint_engine.support.registry import Registry
from verl.utils.torch_functional import masked_sum
from verl.workers.config import ActorConfig
from verl.workers.losses.aggregation import LossTotals, agg_loss, totals_in_force
from verl.workers.losses.kl import MAX_LOG_RATIO


class PolicyLoss(Protocol):
    """Called on every trainer rank, once per micro-batch, by keyword; all tensors are [B, R].

    Returns this micro-batch's share of the mini-batch loss, which `agg_loss` makes, and metrics: means over the tokens
    of the micro-batch. A loss that has a parameter `totals` gets those of the mini-batch, and its metrics are shares,
    too: their sums over micro-batches and ranks are the means over the tokens of the mini-batch.
    """

    def __call__(
        self,
        *,
        old_log_prob: torch.Tensor,
        log_prob: torch.Tensor,
        advantages: torch.Tensor,
        response_mask: torch.Tensor,
        loss_agg_mode: str,
        config: ActorConfig,
        rollout_is_weights: torch.Tensor | None,
    ) -> tuple[torch.Tensor, dict[str, float]]: ...


ARGUMENTS = (
    *("old_log_prob", "log_prob", "advantages", "response_mask"),
    *("loss_agg_mode", "config", "rollout_is_weights"),
)
POLICY_LOSSES: Registry[PolicyLoss] = Registry("actor.policy_loss.loss_mode", ARGUMENTS)
POLICY_LOSS_REGISTRY = POLICY_LOSSES.functions


def register_policy_loss(name: str) -> Callable[[PolicyLoss], PolicyLoss]:
    """Decorator that makes a `PolicyLoss` available as `actor.policy_loss.loss_mode=name`."""
    return POLICY_LOSSES.register(name)


def get_policy_loss_fn(name: str) -> PolicyLoss:
    """The loss of that name. Raises ConfigError for an unknown name, and for a function with a wrong signature."""
    return POLICY_LOSSES.get(name)


def token_share(values: torch.Tensor, mask: torch.Tensor, totals: LossTotals) -> float:
    """This micro-batch's share of the mean of `values` over the tokens of the mini-batch."""
    return masked_sum(values.detach().float(), mask).item() / max(totals.num_tokens, 1.0)


@register_policy_loss("vanilla")
def compute_policy_loss_vanilla(
    old_log_prob: torch.Tensor,
    log_prob: torch.Tensor,
    advantages: torch.Tensor,
    response_mask: torch.Tensor,
    loss_agg_mode: str = "token-mean",
    config: ActorConfig | None = None,
    rollout_is_weights: torch.Tensor | None = None,
    *,
    totals: LossTotals | None = None,
) -> tuple[torch.Tensor, dict[str, float]]:
    """Clipped PPO with a dual clip.

    With r = pi / pi_old the loss of a token is -min(r A, clip(r, 1 - low, 1 + high) A) (PPO, arXiv:1707.06347; a `high`
    of its own is DAPO's clip-higher, arXiv:2503.14476). Where A < 0 that is unbounded as r grows; it is held to at most
    -c A with c = clip_ratio_c (dual clip, arXiv:1912.09729, eq. 5). `rollout_is_weights` multiply the token losses.
    """
    config = config or ActorConfig()
    totals = totals or totals_in_force(response_mask)
    mask = response_mask.bool()
    low, high = config.clip_range
    log_ratio = (log_prob - old_log_prob).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    ratio = log_ratio.exp()

    unclipped = -advantages * ratio
    clipped = -advantages * ratio.clamp(1.0 - low, 1.0 + high)
    pessimistic = torch.maximum(unclipped, clipped)
    bound = -advantages * config.clip_ratio_c
    token_losses = torch.where(advantages < 0, torch.minimum(pessimistic, bound), pessimistic)
    if rollout_is_weights is not None:
        token_losses = token_losses * rollout_is_weights

    metrics = {
        "actor/pg_clipfrac": token_share(clipped > unclipped, mask, totals),
        "actor/ppo_kl": token_share(-log_ratio, mask, totals),
        "actor/pg_clipfrac_lower": token_share((pessimistic > bound) & (advantages < 0), mask, totals),
    }
    return agg_loss(token_losses, mask, loss_agg_mode, totals=totals), metrics
