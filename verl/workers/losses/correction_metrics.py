"""Metrics of the mismatch between rollout engine and trainer, under verl's names `rollout_corr/...`."""

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
    tokens, of_sequences = used[mask], masked_mean(used, mask, axis=-1)[sequences]
    lower, upper = config.is_bounds
    low = 1.0 / upper if lower is None else lower
    extremes = ratios if per_sequence else tokens
    mean_ratios = masked_mean(ratio, mask, axis=-1)[sequences]
    figures = {
        "mean": tokens.mean(),
        "std": tokens.std(correction=0),
        "eff_sample_size": tokens.mean() ** 2 / tokens.square().mean().clamp(min=1e-30),
        "min": extremes.min(),
        "max": extremes.max(),
        "ratio_fraction_high": (ratios > upper).float().mean(),
        "ratio_fraction_low": (ratios < low).float().mean(),
        **_of_sequences(of_sequences, usual=1.0),
        "seq_fraction_high": (mean_ratios > upper).float().mean(),
        "seq_fraction_low": (mean_ratios < low).float().mean(),
    }
    if lower is not None:
        figures["oob_ratio"] = ((ratio < lower) | (ratio > upper))[mask].float().mean()
    if config.rollout_is_batch_normalize:
        figures["batch_norm_factor"] = bounded(ratios, config).mean()
    return _named("rollout_corr/rollout_is_", figures)


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
    tokens, of_sequences = values[mask], masked_mean(values, mask, axis=-1)[sequences]
    bounded_values = tokens if name.startswith("token") else of_sequences
    outside = mask & ~((values >= low) & (values <= high))
    figures = {
        "mean": tokens.mean(),
        "std": tokens.clamp(low, high).std(correction=0),
        "min": tokens.min(),
        "max": tokens.max(),
        "fraction_high": (bounded_values > high).float().mean(),
        "fraction_low": (bounded_values < low).float().mean(),
        **_of_sequences(of_sequences, usual=0.0),
        "seq_fraction_high": (of_sequences > high).float().mean(),
        "masked_fraction": outside.sum() / mask.sum(),
        "seq_masked_fraction": outside.any(-1)[sequences].float().mean(),
    }
    if lower is not None:
        figures["seq_fraction_low"] = (of_sequences < low).float().mean()
    return _named(f"rollout_corr/rollout_rs_{name}_", figures)


@torch.no_grad()
def off_policy_metrics(
    old_log_prob: torch.Tensor, rollout_log_prob: torch.Tensor, mask: torch.Tensor
) -> dict[str, float]:
    """How far apart the two policies are: divergences over tokens, perplexities over sequences; inputs [B, R]."""
    log_ratio = torch.where(mask, old_log_prob - rollout_log_prob, 0.0)
    of_tokens, sequences = clamped(log_ratio)[mask], mask.any(-1)
    training = -masked_mean(old_log_prob, mask, axis=-1)[sequences]
    rollout = -masked_mean(rollout_log_prob, mask, axis=-1)[sequences]
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
    return _named("rollout_corr/", metrics)


def _of_sequences(means: torch.Tensor, usual: float) -> dict[str, torch.Tensor]:
    return {
        "seq_mean": means.mean(),
        "seq_std": means.std() if len(means) > 1 else means.new_zeros(()),
        "seq_min": means.min(),
        "seq_max": means.max(),
        "seq_max_deviation": (means - usual).abs().max(),
    }


def _named(prefix: str, figures: dict[str, torch.Tensor]) -> dict[str, float]:
    """All of them come from a device at once: each alone would wait for what the device has still to do."""
    values = torch.stack([value.float() for value in figures.values()]).tolist()
    return {f"{prefix}{name}": value for name, value in zip(figures, values, strict=True)}
