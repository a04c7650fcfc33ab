"""Policy losses that choose tokens by more than their ratio. Signatures and shares are those of `PolicyLoss`."""

from __future__ import annotations

import torch

from verl.utils.torch_functional import masked_mean
from verl.workers.config import ActorConfig
from verl.workers.losses.aggregation import LossTotals, agg_loss, totals_in_force
from verl.workers.losses.policy import register_policy_loss, token_share
from verl.workers.losses.variants import Result, log_ratio_of, weighted


@register_policy_loss("clip_cov")
def compute_policy_loss_clip_cov(
    old_log_prob: torch.Tensor,
    log_prob: torch.Tensor,
    advantages: torch.Tensor,
    response_mask: torch.Tensor,
    loss_agg_mode: str = "token-mean",
    config: ActorConfig | None = None,
    rollout_is_weights: torch.Tensor | None = None,
    *,
    totals: LossTotals | None = None,
) -> Result:
    """Clip-Cov (arXiv:2505.22617, eq. 10 to 12): PPO's clipped loss, without a few tokens of high covariance.

    The covariance of a token is (A - mean A) (log pi - mean log pi), over the tokens of the micro-batch. Of those
    between `clip_cov_lb` and `clip_cov_ub` that PPO does not clip, a share `clip_cov_ratio` of all tokens, at least
    one, is drawn at random and has neither loss nor gradient.
    """
    config = config or ActorConfig()
    totals = totals or totals_in_force(response_mask)
    mask, chosen = response_mask.bool(), config.policy_loss
    low, high = config.clip_range
    log_ratio = log_ratio_of(log_prob, old_log_prob)
    ratio = log_ratio.exp()
    unclipped, clipped = -advantages * ratio, -advantages * ratio.clamp(1.0 - low, 1.0 + high)
    covariance = _covariance(log_prob, advantages, mask)
    eligible = mask & (clipped <= unclipped) & (covariance > chosen.clip_cov_lb) & (covariance < chosen.clip_cov_ub)
    places = eligible.flatten().nonzero().flatten()
    count = min(_share(chosen.clip_cov_ratio, mask), len(places))
    left_out = torch.zeros_like(mask).flatten()
    left_out[places[torch.randperm(len(places))[:count].to(places.device)]] = True
    left_out = left_out.view_as(mask)
    losses = torch.where(left_out, 0.0, torch.maximum(unclipped, clipped))
    metrics = {
        "actor/pg_clipfrac": token_share(left_out, mask, totals),
        "actor/ppo_kl": token_share(-log_ratio, mask, totals),
        "actor/pg_clipfrac_lower": token_share(clipped > unclipped, mask, totals),
    }
    return agg_loss(weighted(losses, rollout_is_weights), mask, loss_agg_mode, totals=totals), metrics


@register_policy_loss("kl_cov")
def compute_policy_loss_kl_cov(
    old_log_prob: torch.Tensor,
    log_prob: torch.Tensor,
    advantages: torch.Tensor,
    response_mask: torch.Tensor,
    loss_agg_mode: str = "token-mean",
    config: ActorConfig | None = None,
    rollout_is_weights: torch.Tensor | None = None,
    *,
    totals: LossTotals | None = None,
) -> Result:
    """KL-Cov (arXiv:2505.22617, eq. 13 and 14): -r A, plus `ppo_kl_coef` |log r| for the tokens of highest covariance.

    They are a share `kl_cov_ratio` of the tokens of the micro-batch, at least one; see Clip-Cov. Nothing is clipped.
    `actor/ppo_kl` is the mean of |log r| here, as in verl.
    """
    config = config or ActorConfig()
    totals = totals or totals_in_force(response_mask)
    mask, chosen = response_mask.bool(), config.policy_loss
    log_ratio = log_ratio_of(log_prob, old_log_prob)
    covariance = _covariance(log_prob, advantages, mask).masked_fill(~mask, -torch.inf).flatten()
    penalised = torch.zeros_like(mask).flatten()
    penalised[covariance.topk(_share(chosen.kl_cov_ratio, mask)).indices] = True
    penalised = penalised.view_as(mask) & mask
    losses = -advantages * log_ratio.exp() + torch.where(penalised, chosen.ppo_kl_coef * log_ratio.abs(), 0.0)
    metrics = {
        "actor/ppo_kl": token_share(log_ratio.abs(), mask, totals),
        "actor/kl_cov_frac": token_share(penalised, mask, totals),
    }
    return agg_loss(weighted(losses, rollout_is_weights), mask, loss_agg_mode, totals=totals), metrics


@register_policy_loss("dppo_tv")
def compute_policy_loss_dppo_tv(
    old_log_prob: torch.Tensor,
    log_prob: torch.Tensor,
    advantages: torch.Tensor,
    response_mask: torch.Tensor,
    loss_agg_mode: str = "token-mean",
    config: ActorConfig | None = None,
    rollout_is_weights: torch.Tensor | None = None,
    *,
    totals: LossTotals | None = None,
) -> Result:
    """DPPO-Binary-TV (arXiv:2602.04879): the trust region is a total variation, |pi - pi_old| of the sampled token."""
    divergence = (log_prob.detach().exp() - old_log_prob.exp()).abs()
    return _within_divergence(
        divergence, old_log_prob, log_prob, advantages, response_mask, loss_agg_mode, config, rollout_is_weights, totals
    )


@register_policy_loss("dppo_kl")
def compute_policy_loss_dppo_kl(
    old_log_prob: torch.Tensor,
    log_prob: torch.Tensor,
    advantages: torch.Tensor,
    response_mask: torch.Tensor,
    loss_agg_mode: str = "token-mean",
    config: ActorConfig | None = None,
    rollout_is_weights: torch.Tensor | None = None,
    *,
    totals: LossTotals | None = None,
) -> Result:
    """DPPO-Binary-KL (arXiv:2602.04879): as DPPO-Binary-TV, with the sampled token's binary KL(pi_old || pi)."""
    before, now = old_log_prob.double().exp(), log_prob.detach().double().exp()
    rest_before, rest_now = (1.0 - before).clamp(min=1e-12), (1.0 - now).clamp(min=1e-12)
    divergence = before * (old_log_prob - log_prob.detach()) + rest_before * (rest_before.log() - rest_now.log())
    return _within_divergence(
        divergence, old_log_prob, log_prob, advantages, response_mask, loss_agg_mode, config, rollout_is_weights, totals
    )


def _within_divergence(
    divergence: torch.Tensor,
    old_log_prob: torch.Tensor,
    log_prob: torch.Tensor,
    advantages: torch.Tensor,
    response_mask: torch.Tensor,
    loss_agg_mode: str,
    config: ActorConfig | None,
    rollout_is_weights: torch.Tensor | None,
    totals: LossTotals | None,
) -> Result:
    """-min(r, c) A log pi with c = clip_ratio_c, without the tokens that would go on moving away.

    Those are tokens with a divergence above `clip_ratio_high`, r > 1 and A > 0, or above `clip_ratio_low`, r < 1 and
    A <= 0. The truncated ratio is a weight and has no gradient, as in verl 0.9.1.
    """
    config = config or ActorConfig()
    totals = totals or totals_in_force(response_mask)
    mask = response_mask.bool()
    low, high = config.clip_range
    log_ratio = log_ratio_of(log_prob, old_log_prob)
    ratio = log_ratio.exp()
    above = (advantages > 0) & (ratio > 1.0) & (divergence > high)
    below = (advantages <= 0) & (ratio < 1.0) & (divergence > low)
    left_out = above | below
    losses = -advantages * ratio.detach().clamp(max=config.clip_ratio_c) * log_prob
    losses = weighted(torch.where(left_out, 0.0, losses), rollout_is_weights)
    metrics = {
        "actor/pg_clipfrac": token_share(left_out, mask, totals),
        "actor/ppo_kl": token_share(-log_ratio, mask, totals),
        "actor/pg_clipfrac_lower": token_share(~left_out & (ratio > config.clip_ratio_c), mask, totals),
    }
    return agg_loss(losses, mask, loss_agg_mode, totals=totals), metrics


def _covariance(log_prob: torch.Tensor, advantages: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    log_prob = log_prob.detach()
    return (advantages - masked_mean(advantages, mask)) * (log_prob - masked_mean(log_prob, mask))


def _share(ratio: float, mask: torch.Tensor) -> int:
    """So many of the tokens, at least one."""
    return max(1, int(ratio * int(mask.sum())))
