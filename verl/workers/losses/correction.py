"""Correct the mismatch of rollout engine and trainer: importance weights, and rejection of tokens that are too far off.

The driver applies it once per batch, to the policy before the update. If the engine's log-probs stand for that policy,
`ActorLoss` applies it to the present one.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch

from verl.utils.torch_functional import masked_mean
from verl.workers.config import RolloutCorrectionConfig
from verl.workers.losses.kl import MAX_LOG_RATIO

KEPT = "kept_tokens"
"""Tensor of a batch [B, R]: 0 on tokens that were rejected before the update; none has been without it."""


def learned_from(batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """`response_mask` without rejected tokens, of its dtype.

    Losses are still divided by the tokens and sequences of `response_mask`, so that rejection does not change the
    weight of other tokens.
    """
    mask = batch["response_mask"]
    return mask * batch[KEPT].to(mask.dtype) if KEPT in batch else mask


@torch.no_grad()
def importance_weights(
    log_ratio: torch.Tensor, mask: torch.Tensor, config: RolloutCorrectionConfig
) -> tuple[torch.Tensor, torch.Tensor] | tuple[None, None]:
    """(weights [B, R], the ratios that they come from: one per token [n], or per sequence that has tokens [s]).

    `log_ratio` is log pi_trainer / pi_rollout, 0 where the mask is. Truncated importance sampling: E. Ionides, 2008;
    for this mismatch F. Yao et al., "Your Efficient RL Framework Secretly Brings You Off-Policy RL Training", 2025.
    With a lower bound weights outside of the two are 0 (IcePop: Ling Team, "Every Step Evolves", arXiv:2510.18855).
    `token`: the ratio of each token; `sequence`: the product over a sequence, the same for all of its tokens.
    """
    if config.rollout_is is None:
        return None, None
    if config.rollout_is == "token":
        ratio = clamped(log_ratio).exp()
        observed = ratio[mask]
    else:
        per_sequence = clamped(log_ratio.sum(-1, keepdim=True)).exp()
        ratio = per_sequence.expand_as(log_ratio)
        observed = per_sequence[mask.any(-1)].flatten()
    weights = torch.where(mask, bounded(ratio, config), 0.0)
    if config.rollout_is_batch_normalize:
        mean = bounded(observed, config).mean() if len(observed) else weights.new_zeros(())
        weights = torch.where(mean > 0, weights / mean, weights)
    return weights, observed


def bounded(ratio: torch.Tensor, config: RolloutCorrectionConfig) -> torch.Tensor:
    lower, upper = config.is_bounds
    if lower is None:
        return ratio.clamp(max=upper)
    return torch.where((ratio >= lower) & (ratio <= upper), ratio, 0.0)


@torch.no_grad()
def kept_tokens(log_ratio: torch.Tensor, mask: torch.Tensor, config: RolloutCorrectionConfig) -> torch.Tensor:
    """`mask` [B, R] without the tokens and sequences that `rollout_rs` and the veto reject.

    Y. Li et al., "Trust Region Masking for Long-Horizon LLM Reinforcement Learning", arXiv:2512.23075, and J. Liu et
    al., "When Speed Kills Stability", 2025. With d = log pi_trainer / pi_rollout, k1 is -d, k2 is
    d^2 / 2, and k3 is exp(d) - 1 - d (J. Schulman, "Approximating KL Divergence", 2020). The bounds of k1 are ratios
    pi_rollout / pi_trainer, as in verl 0.9.1: log lower <= k1 <= log upper.
    """
    kept = mask.clone()
    for name, lower, upper in config.rejections:
        low, high = bounds_of_drift(lower, upper)
        statistic = drift(name, log_ratio, mask)
        kept &= (statistic >= low) & (statistic <= high)
    if (veto := config.rollout_token_veto_threshold) is not None:
        kept &= ~((clamped(log_ratio).exp() < veto) & mask).any(-1, keepdim=True)
    return kept


def drift(name: str, log_ratio: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """The quantity that `rollout_rs=name` bounds: [B, R] for tokens, 0 where the mask is 0; [B, 1] for sequences."""
    level, _, kind = name.rpartition("_")
    return _over(level, _divergence(log_ratio, kind), mask)


def bounds_of_drift(lower: float | None, upper: float) -> tuple[float, float]:
    """From bounds of ratios, or from an upper one of a divergence alone, to those of `drift`."""
    return (-math.inf, upper) if lower is None else (math.log(lower), math.log(upper))


def _divergence(log_ratio: torch.Tensor, kind: str) -> torch.Tensor:
    if kind == "k1":
        return -log_ratio
    if kind == "k2":
        return 0.5 * log_ratio.square()
    return clamped(log_ratio).exp() - 1.0 - log_ratio


def _over(level: str, values: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """[B, R] for tokens, else [B, 1]"""
    values = torch.where(mask, values, 0.0)
    if level == "token":
        return values
    if level == "seq_sum":
        return values.sum(-1, keepdim=True)
    if level == "seq_max":
        return values.amax(-1, keepdim=True)
    return masked_mean(values, mask, axis=-1).unsqueeze(-1)


def clamped(log_ratio: torch.Tensor) -> torch.Tensor:
    return log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
