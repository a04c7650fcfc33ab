"""The rollout engine's probabilities against the trainer's: how far apart they are, and a correction for it.

Both sides have, or should have, the same weights; kernels, dtypes and, in asynchronous training, versions differ.
"""

from __future__ import annotations

import torch

from verl.utils.torch_functional import masked_mean
from verl.workers.config import RolloutCorrectionConfig
from verl.workers.losses.correction import bounded, bounds_of_drift, clamped, drift, importance_weights, kept_tokens


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


def weight_metrics(
    log_ratio: torch.Tensor, ratios: torch.Tensor, mask: torch.Tensor, config: RolloutCorrectionConfig
) -> dict[str, float]:
    """What importance weights are before they are divided by their mean, under verl's names and with its meaning.

    Mean, deviation and effective sample size are those over tokens, and so are `_min` and `_max` of `token`; those of
    `sequence` are the extremes of the ratios [s], as `ratio_fraction_*` are shares of them. `rollout_is_seq_*` are
    about the means of weights over each sequence, and their fractions about those of ratios.
    """
    per_sequence = config.rollout_is == "sequence"
    ratio = clamped(log_ratio.sum(-1, keepdim=True) if per_sequence else log_ratio).exp().expand_as(log_ratio)
    used, sequences = bounded(ratio, config), mask.any(-1)
    tokens, of_sequences = used[mask], masked_mean(used, mask, dim=-1)[sequences]
    lower, upper = config.is_bounds
    low = 1.0 / upper if lower is None else lower
    extremes = ratios if per_sequence else tokens
    mean_ratios = masked_mean(ratio, mask, dim=-1)[sequences]
    figures = {
        "mean": tokens.mean(),
        "std": tokens.std(correction=0),
        "eff_sample_size": tokens.mean() ** 2 / tokens.square().mean().clamp(min=1e-30),
        "min": extremes.min(),
        "max": extremes.max(),
        "ratio_fraction_high": (ratios > upper).float().mean(),
        "ratio_fraction_low": (ratios < low).float().mean(),
        "seq_mean": of_sequences.mean(),
        "seq_std": of_sequences.std() if len(of_sequences) > 1 else of_sequences.new_zeros(()),
        "seq_min": of_sequences.min(),
        "seq_max": of_sequences.max(),
        "seq_max_deviation": (of_sequences - 1.0).abs().max(),
        "seq_fraction_high": (mean_ratios > upper).float().mean(),
        "seq_fraction_low": (mean_ratios < low).float().mean(),
    }
    if lower is not None:
        figures["oob_ratio"] = ((ratio < lower) | (ratio > upper))[mask].float().mean()
    if config.rollout_is_batch_normalize:
        figures["batch_norm_factor"] = bounded(ratios, config).mean()
    return {f"rollout_corr/rollout_is_{name}": value.item() for name, value in figures.items()}


@torch.no_grad()
def rejected(
    old_log_prob: torch.Tensor,
    rollout_log_prob: torch.Tensor,
    response_mask: torch.Tensor,
    config: RolloutCorrectionConfig,
) -> tuple[torch.Tensor, dict[str, float]]:
    """`response_mask` without what is not learned from, and how much that is: shares of tokens and of sequences.

    A rejected response still counts in the baseline of its group: what it earned is known.
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


def rejection_metrics(
    log_ratio: torch.Tensor, mask: torch.Tensor, name: str, lower: float | None, upper: float
) -> dict[str, float]:
    """What `rollout_rs=name` bounds, and rejects by itself, under verl's names and with its meaning.

    Mean and extremes are those over tokens, and so is the deviation, of values cut off at the bounds; `seq_*` are about
    the means over each sequence. `fraction_high` and `_low` are shares of what is bounded: of tokens, or of sequences.
    """
    low, high = bounds_of_drift(lower, upper)
    values = drift(name, log_ratio, mask).expand_as(log_ratio)
    sequences = mask.any(-1)
    tokens, of_sequences = values[mask], masked_mean(values, mask, dim=-1)[sequences]
    bounded_values = tokens if name.startswith("token") else of_sequences
    outside = mask & ~((values >= low) & (values <= high))
    figures = {
        "mean": tokens.mean(),
        "std": tokens.clamp(low, high).std(correction=0),
        "min": tokens.min(),
        "max": tokens.max(),
        "fraction_high": (bounded_values > high).float().mean(),
        "fraction_low": (bounded_values < low).float().mean(),
        "seq_mean": of_sequences.mean(),
        "seq_std": of_sequences.std() if len(of_sequences) > 1 else of_sequences.new_zeros(()),
        "seq_min": of_sequences.min(),
        "seq_max": of_sequences.max(),
        "seq_max_deviation": of_sequences.abs().max(),
        "seq_fraction_high": (of_sequences > high).float().mean(),
        "masked_fraction": outside.sum() / mask.sum(),
        "seq_masked_fraction": outside.any(-1)[sequences].float().mean(),
    }
    if lower is not None:
        figures["seq_fraction_low"] = (of_sequences < low).float().mean()
    return {f"rollout_corr/rollout_rs_{name}_{figure}": value.item() for figure, value in figures.items()}


@torch.no_grad()
def off_policy_metrics(
    old_log_prob: torch.Tensor, rollout_log_prob: torch.Tensor, mask: torch.Tensor
) -> dict[str, float]:
    """How far apart the two policies are: divergences over tokens, perplexities over sequences; inputs [B, R]."""
    log_ratio = torch.where(mask, old_log_prob - rollout_log_prob, 0.0)
    of_tokens, sequences = clamped(log_ratio)[mask], mask.any(-1)
    training = -masked_mean(old_log_prob, mask, dim=-1)[sequences]
    rollout = -masked_mean(rollout_log_prob, mask, dim=-1)[sequences]
    difference = training - rollout  # of mean -log p: above 0 where the trainer finds a response less likely
    of_sequences = clamped(log_ratio.sum(-1))[sequences]
    metrics = {
        "kl": -of_tokens.mean(),
        "k3_kl": (of_tokens.exp() - of_tokens - 1.0).mean(),
        "chi2_token": clamped(2.0 * of_tokens).exp().mean() - 1.0,
        "chi2_seq": clamped(2.0 * of_sequences).exp().mean() - 1.0,
        "training_ppl": clamped(training).exp().mean(),
        "training_log_ppl": training.mean(),
        "rollout_ppl": clamped(rollout).exp().mean(),
        "rollout_log_ppl": rollout.mean(),
        "log_ppl_diff": difference.mean(),
        "log_ppl_abs_diff": difference.abs().mean(),
        "log_ppl_diff_max": difference.max(),
        "log_ppl_diff_min": difference.min(),
        "ppl_ratio": clamped(difference).exp().mean(),
    }
    return {f"rollout_corr/{name}": value.item() for name, value in metrics.items()}


@torch.no_grad()
def rollout_probs_diff_metrics(
    old_log_prob: torch.Tensor, rollout_log_prob: torch.Tensor, response_mask: torch.Tensor
) -> dict[str, float]:
    """|p_trainer - p_rollout| over the tokens that the policy generated, and the correlation of the two; inputs [B, R].

    Both must be log-probabilities at the same temperature. `_valid` is 0 without such tokens: nothing else is told
    then. The correlation of constants is not defined: it is reported as 1 if the two sides are equal, else as 0.
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
