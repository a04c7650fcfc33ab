"""How far the rollout engine's policy and the trainer's are apart, under verl's names `rollout_corr/...`."""

from __future__ import annotations

import torch

from verl.utils.torch_functional import masked_mean
from verl.workers.config import RolloutCorrectionConfig
from verl.workers.losses.correction import bounded, bounds_of_drift, clamped, drift


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
