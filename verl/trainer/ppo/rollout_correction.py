"""The rollout engine's probabilities against the trainer's: how far apart they are, and a correction for it.

Both sides have, or should have, the same weights; kernels, dtypes and, in asynchronous training, versions differ.
"""

from __future__ import annotations

import torch

from verl.workers.config import RolloutCorrectionConfig
from verl.workers.losses.kl import MAX_LOG_RATIO


@torch.no_grad()
def compute_rollout_importance_weights(
    old_log_prob: torch.Tensor,
    rollout_log_prob: torch.Tensor,
    response_mask: torch.Tensor,
    config: RolloutCorrectionConfig,
) -> tuple[torch.Tensor | None, dict[str, float]]:
    """Weights min(pi_trainer / pi_rollout, threshold) for the policy loss; inputs and weights are [B, R].

    Truncated importance sampling: E. Ionides, "Truncated Importance Sampling", 2008; for this mismatch F. Yao et al.,
    "Your Efficient RL Framework Secretly Brings You Off-Policy RL Training", 2025. `token`: the ratio of each token;
    `sequence`: the product of the ratios of a sequence's tokens, the same for all of them. Weights are 0 where the mask
    is, carry no gradient, and are None with `rollout_is=null`. Metrics (`rollout_corr/...`) come in either case;
    `rollout_is_min` and `_max` are those before truncation.
    """
    mask = response_mask.bool()
    if not mask.any():
        return (None if config.rollout_is is None else torch.zeros_like(old_log_prob)), {}
    log_ratio = torch.where(mask, old_log_prob - rollout_log_prob, 0.0)
    kept = _clamped(log_ratio)[mask]
    metrics = {
        "rollout_corr/kl": -kept.mean().item(),
        "rollout_corr/k3_kl": (kept.exp() - kept - 1.0).mean().item(),
    }
    if config.rollout_is is None:
        return None, metrics

    if config.rollout_is == "token":
        ratio = _clamped(log_ratio).exp()
        observed = ratio[mask]
    else:
        per_sequence = _clamped(log_ratio.sum(-1, keepdim=True)).exp()
        ratio = per_sequence.expand_as(log_ratio)
        observed = per_sequence[mask.any(-1)].flatten()
    truncated = observed.clamp(max=config.rollout_is_threshold)
    metrics |= {
        "rollout_corr/rollout_is_mean": truncated.mean().item(),
        "rollout_corr/rollout_is_std": truncated.std(correction=0).item(),
        "rollout_corr/rollout_is_min": observed.min().item(),
        "rollout_corr/rollout_is_max": observed.max().item(),
        "rollout_corr/rollout_is_ratio_fraction_high": (observed > config.rollout_is_threshold).float().mean().item(),
        "rollout_corr/rollout_is_eff_sample_size": (truncated.mean() ** 2 / truncated.square().mean()).item(),
    }
    return torch.where(mask, ratio.clamp(max=config.rollout_is_threshold), 0.0), metrics


@torch.no_grad()
def rollout_probs_diff_metrics(
    old_log_prob: torch.Tensor, rollout_log_prob: torch.Tensor, response_mask: torch.Tensor
) -> dict[str, float]:
    """|p_trainer - p_rollout| over the tokens that the policy generated, and the correlation of the two; inputs [B, R].

    Both must be log-probabilities at the same temperature. Empty without such tokens. The correlation of constants is
    not defined: it is reported as 1 if the two sides are equal, else as 0.
    """
    mask = response_mask.bool()
    if not mask.any():
        return {}
    trainer = old_log_prob[mask].double().exp()
    rollout = rollout_log_prob[mask].double().exp()
    difference = (trainer - rollout).abs()
    return {
        "training/rollout_probs_diff_mean": difference.mean().item(),
        "training/rollout_probs_diff_max": difference.max().item(),
        "training/rollout_probs_diff_std": difference.std(correction=0).item(),
        "training/rollout_actor_probs_pearson_corr": _pearson(trainer, rollout),
    }


def _clamped(log_ratio: torch.Tensor) -> torch.Tensor:
    return log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)


def _pearson(left: torch.Tensor, right: torch.Tensor) -> float:
    if left.min() == left.max() or right.min() == right.max():
        return float(torch.equal(left, right))
    left, right = left - left.mean(), right - right.mean()
    return float(left @ right / (left.norm() * right.norm()))
