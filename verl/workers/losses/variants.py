"""Policy losses other than PPO's. Signatures and shares are those of `verl.workers.losses.policy.PolicyLoss`."""

from __future__ import annotations

import torch

from verl.utils.config import ConfigError
from verl.utils.torch_functional import masked_mean
from verl.workers.config import ActorConfig
from verl.workers.losses.aggregation import LossTotals, agg_loss, totals_in_force
from verl.workers.losses.kl import MAX_LOG_RATIO
from verl.workers.losses.policy import register_policy_loss, token_share

MAX_SEQUENCE_LOG_RATIO = 10.0
PER_SEQUENCE = "seq-mean-token-mean"
"""Some losses are defined as means over sequences, whatever `loss_agg_mode` says."""

Result = tuple[torch.Tensor, dict[str, float]]


def weighted(losses: torch.Tensor, weights: torch.Tensor | None) -> torch.Tensor:
    return losses if weights is None else losses * weights


def log_ratio_of(log_prob: torch.Tensor, old_log_prob: torch.Tensor) -> torch.Tensor:
    return (log_prob - old_log_prob).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)


@register_policy_loss("gspo")
def compute_policy_loss_gspo(
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
    """Group sequence policy optimisation (arXiv:2507.18071, eq. 5 and 14).

    The ratio of a sequence is s = exp(mean over its tokens of log pi / pi_old); that of a token is s in value, with the
    gradient of its own probability. -min(s A, clip(s, 1 - low, 1 + high) A), aggregated as `loss_agg_mode` says, as in
    verl 0.9.1; the paper's is seq-mean-token-mean.
    """
    config = config or ActorConfig()
    totals = totals or totals_in_force(response_mask)
    mask = response_mask.bool()
    low, high = config.clip_range
    log_ratio = log_prob - old_log_prob
    of_sequence = masked_mean(log_ratio, mask, axis=-1).detach().unsqueeze(-1)
    ratio = (log_prob - log_prob.detach() + of_sequence).clamp(max=MAX_SEQUENCE_LOG_RATIO).exp()
    unclipped, clipped = -advantages * ratio, -advantages * ratio.clamp(1.0 - low, 1.0 + high)
    losses = weighted(torch.maximum(unclipped, clipped), rollout_is_weights)
    metrics = {
        "actor/pg_clipfrac": token_share(clipped > unclipped, mask, totals),
        "actor/ppo_kl": token_share(-log_ratio, mask, totals),
        "actor/pg_clipfrac_lower": 0.0,
    }
    return agg_loss(losses, mask, loss_agg_mode, totals=totals), metrics


@register_policy_loss("geo_mean")
def compute_policy_loss_geo_mean(
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
    """Geometric-mean policy optimisation (GMPO, arXiv:2507.20673, eq. 4).

    Log-ratios of tokens are clipped to [-low, high] on the side on which the sequence has no more to gain; the ratio of
    a sequence is exp of their mean, and its loss -A ratio with the mean advantage of its tokens. Mean over sequences.
    With `rollout_is_weights` a sequence has the geometric mean of its tokens' weights. Clip fractions count every token
    whose log-ratio is outside of the range, as verl's do, whether the clip is in force or not.
    """
    config = config or ActorConfig()
    totals = totals or totals_in_force(response_mask)
    mask = response_mask.bool()
    low, high = config.clip_range
    log_ratio = log_ratio_of(log_prob, old_log_prob)
    clipped = log_ratio.clamp(-low, high)
    sign = advantages.sign()
    kept = sign * torch.minimum(sign * log_ratio, sign * clipped)
    ratio = masked_mean(kept, mask, axis=-1).exp()
    losses = -masked_mean(advantages, mask, axis=-1) * ratio
    if rollout_is_weights is not None:
        smallest = torch.finfo(rollout_is_weights.dtype).tiny
        losses = losses * masked_mean(rollout_is_weights.clamp(min=smallest).log(), mask, axis=-1).exp()
    per_token = losses.unsqueeze(-1).expand_as(log_prob)
    outside = clipped != log_ratio
    metrics = {
        "actor/pg_clipfrac": token_share(outside & (advantages > 0), mask, totals),
        "actor/ppo_kl": token_share(-log_ratio, mask, totals),
        "actor/pg_clipfrac_lower": token_share(outside & (advantages < 0), mask, totals),
    }
    return agg_loss(per_token, mask, PER_SEQUENCE, totals=totals), metrics


@register_policy_loss("gpg")
def compute_policy_loss_gpg(
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
    """Group policy gradient (GPG, arXiv:2504.02546, eq. 3): -A log pi, without ratio or clip."""
    losses = weighted(-advantages * log_prob, rollout_is_weights)
    return agg_loss(losses, response_mask.bool(), loss_agg_mode, totals=totals), {}


def compute_policy_loss_reinforce(
    rollout_log_prob: torch.Tensor,
    log_prob: torch.Tensor,
    advantages: torch.Tensor,
    response_mask: torch.Tensor,
    loss_agg_mode: str = "seq-mean-token-sum",
    config: ActorConfig | None = None,
    rollout_is_weights: torch.Tensor | None = None,
    *,
    totals: LossTotals | None = None,
) -> Result:
    """The plain policy gradient (R. Williams, 1992), -w A log pi, with importance weights w or without.

    It has no name in `actor.policy_loss.loss_mode`: `algorithm.rollout_correction.loss_type=reinforce` chooses it.
    """
    totals, mask = totals or totals_in_force(response_mask), response_mask.bool()
    losses = weighted(-advantages * log_prob, rollout_is_weights)
    metrics = {"actor/ppo_kl": token_share(rollout_log_prob - log_prob, mask, totals)}
    return agg_loss(losses, mask, loss_agg_mode, totals=totals), metrics


@register_policy_loss("dro")
def compute_policy_loss_dro(
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
    """Direct reward optimisation (arXiv:2405.19107): -A log pi + beta / 2 (log pi / pi_old)^2, beta = `dro_beta`.

    Raises ConfigError without `dro_beta`.
    """
    beta = (config or ActorConfig()).policy_loss.dro_beta
    if beta is None:
        raise ConfigError("actor.policy_loss.loss_mode=dro needs actor.policy_loss.dro_beta")
    totals = totals or totals_in_force(response_mask)
    mask = response_mask.bool()
    log_ratio = log_prob - old_log_prob
    losses = weighted(-advantages * log_prob + 0.5 * beta * log_ratio.square(), rollout_is_weights)
    metrics = {"actor/ppo_kl": token_share(-log_ratio, mask, totals)}
    return agg_loss(losses, mask, loss_agg_mode, totals=totals), metrics


@register_policy_loss("sapo")
def compute_policy_loss_sapo(
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
    """Soft adaptive policy optimisation (arXiv:2511.20347, eq. 5 and 6).

    The clip is a soft gate: -A (4 / tau) sigmoid(tau (r - 1)), with tau = tau_pos where A > 0, else tau_neg. Mean over
    tokens, then over sequences.
    """
    config = config or ActorConfig()
    totals = totals or totals_in_force(response_mask)
    mask = response_mask.bool()
    log_ratio = log_ratio_of(log_prob, old_log_prob)
    chosen = config.policy_loss
    tau = torch.where(advantages > 0, chosen.tau_pos, chosen.tau_neg)
    gate = torch.sigmoid(tau * (log_ratio.exp() - 1.0)) * (4.0 / tau)
    losses = weighted(-advantages * gate, rollout_is_weights)
    metrics = {
        "actor/pg_clipfrac": 0.0,
        "actor/ppo_kl": token_share(-log_ratio, mask, totals),
        "actor/pg_clipfrac_lower": 0.0,
    }
    return agg_loss(losses, mask, PER_SEQUENCE, totals=totals), metrics


@register_policy_loss("cispo")
def compute_policy_loss_cispo(
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
    """Clipped importance sampling (CISPO, MiniMax-M1, arXiv:2506.13585, eq. 4): -A clip(r, 1 - low, 1 + high) log pi.

    The clipped ratio is a weight and has no gradient, so every token keeps its own.
    """
    config = config or ActorConfig()
    totals = totals or totals_in_force(response_mask)
    mask = response_mask.bool()
    low, high = config.clip_range
    log_ratio = log_ratio_of(log_prob, old_log_prob)
    ratio = log_ratio.exp().detach()
    clipped = ratio.clamp(1.0 - low, 1.0 + high)
    losses = weighted(-advantages * clipped * log_prob, rollout_is_weights)
    metrics = {
        "actor/pg_clipfrac": token_share(clipped != ratio, mask, totals),
        "actor/ppo_kl": token_share(-log_ratio, mask, totals),
        "actor/pg_clipfrac_lower": 0.0,
    }
    return agg_loss(losses, mask, loss_agg_mode, totals=totals), metrics
