"""Compares the rollout engine's probabilities with the trainer's, and corrects for the difference.

Both sides have, or should have, the same weights; kernels, dtypes and, in asynchronous training, versions differ.
"""

from __future__ import annotations

import torch

from verl.workers.config import RolloutCorrectionConfig
from verl.workers.losses.correction import importance_weights, kept_tokens
from verl.workers.losses.correction_metrics import off_policy_metrics, rejection_metrics, weight_metrics


@torch.no_grad()
def compute_rollout_importance_weights(
    old_log_prob: torch.Tensor,
    rollout_log_prob: torch.Tensor,
    response_mask: torch.Tensor,
    config: RolloutCorrectionConfig,
) -> tuple[torch.Tensor | None, dict[str, float]]:
    """Weights min(pi_trainer / pi_rollout, threshold) for the policy loss; inputs and weights are [B, R].

    Weights are 0 where the mask is, carry no gradient, and are None with `rollout_is=null`. Metrics
    (`rollout_corr/...`) come in either case; see `weight_metrics`.
    """
    mask = response_mask.bool()
    if not mask.any():
        return (None if config.rollout_is is None else torch.zeros_like(old_log_prob)), {}
    log_ratio = torch.where(mask, old_log_prob - rollout_log_prob, 0.0)
    metrics = off_policy_metrics(old_log_prob, rollout_log_prob, mask)
    weights, ratios = importance_weights(log_ratio, mask, config)
    if weights is None or ratios is None:
        return None, metrics
    return weights, metrics | weight_metrics(log_ratio, ratios, mask, config)


@torch.no_grad()
def rejected(
    old_log_prob: torch.Tensor,
    rollout_log_prob: torch.Tensor,
    response_mask: torch.Tensor,
    config: RolloutCorrectionConfig,
) -> tuple[torch.Tensor, dict[str, float]]:
    """`response_mask` without rejected tokens and sequences, and metrics: their shares.

    A rejected response still counts in its group's baseline: its reward is known.
    """
    mask = response_mask.bool()
    if not config.rejects or not mask.any():
        return response_mask, {}
    log_ratio = torch.where(mask, old_log_prob - rollout_log_prob, 0.0)
    kept = kept_tokens(log_ratio, mask, config)
    sequences = mask.any(-1)
    metrics: dict[str, float] = {}
    for rejection in config.rejections:
        metrics |= rejection_metrics(log_ratio, mask, *rejection)
    return kept.to(response_mask.dtype), metrics | {
        "rollout_corr/rollout_rs_masked_fraction": 1.0 - (kept.sum() / mask.sum()).item(),
        "rollout_corr/rollout_rs_seq_masked_fraction": (kept != mask).any(-1)[sequences].float().mean().item(),
    }


@torch.no_grad()
def rollout_probs_diff_metrics(
    old_log_prob: torch.Tensor, rollout_log_prob: torch.Tensor, response_mask: torch.Tensor
) -> dict[str, float]:
    """|p_trainer - p_rollout| over the tokens that the policy generated, and the correlation of the two; inputs [B, R].

    Both must be log-probabilities at the same temperature. Without such tokens only `_valid` = 0 is reported. The
    undefined correlation of constants is reported as 1 if both sides are equal, else as 0.
    """
    mask = response_mask.bool()
    if not mask.any():
        return {"training/rollout_probs_diff_valid": 0.0}
    trainer = old_log_prob[mask].double().exp()
    rollout = rollout_log_prob[mask].double().exp()
    difference = (trainer - rollout).abs()
    return {
        "training/rollout_probs_diff_valid": 1.0,
        "training/rollout_probs_diff_mean": difference.mean().item(),
        "training/rollout_probs_diff_max": difference.max().item(),
        "training/rollout_probs_diff_std": difference.std(correction=0).item(),
        "training/rollout_actor_probs_pearson_corr": _pearson(trainer, rollout),
    }


def _pearson(left: torch.Tensor, right: torch.Tensor) -> float:
    if left.min() == left.max() or right.min() == right.max():
        return float(torch.equal(left, right))
    left, right = left - left.mean(), right - right.mean()
    return float(left @ right / (left.norm() * right.norm()))
