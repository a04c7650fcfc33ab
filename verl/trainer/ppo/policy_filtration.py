"""Policy filtration: draws responses with probabilities that depend on the reliability of their scores.

PF-PPO, "Policy Filtration for RLHF to Mitigate Noise in Reward Models", arXiv:2409.06957: high and low rewards are most
reliable, so an update uses a batch drawn anew from the generated one.
"""

from __future__ import annotations

import torch

from verl.protocol import DataProto, tensors_of
from verl.trainer.ppo.even_batches import without_padding
from verl.utils.config import from_mapping
from verl.workers.config.algorithm import PolicyFiltrationConfig

TIMES_AS_LIKELY = 4.0
"""With max_random, the best response is drawn so many times as often as any other."""


def filtration_weights(scores: torch.Tensor, settings: PolicyFiltrationConfig) -> torch.Tensor:
    """Relative probabilities [B] of drawing each response, from the scores [B] of a batch.

    pow: |score| ** weight_pow. max_min: 1 for the highest and the lowest score, 0 for others. max_random:
    TIMES_AS_LIKELY for the highest score, 1 for others. If all are 0, all become 1.
    """
    best = scores == scores.max()
    if settings.reweight_method == "pow":
        weights = scores.abs().double() ** settings.weight_pow
    elif settings.reweight_method == "max_min":
        weights = (best | (scores == scores.min())).double()
    else:
        weights = torch.where(best, TIMES_AS_LIKELY, 1.0).double()
    return weights if bool(weights.sum() > 0) else torch.ones_like(weights)


def filtered(batch: DataProto, settings: PolicyFiltrationConfig, seed: int) -> tuple[DataProto, dict[str, float]]:
    """Draw as many samples as `batch` has without padding, with replacement; returns them and metrics of the draw.

    With the same `seed`, a repeated step draws the same batch.
    """
    batch = without_padding(batch)
    weights = filtration_weights(tensors_of(batch)["token_level_scores"].sum(-1), settings)
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.multinomial(weights, len(batch), replacement=True, generator=generator)
    rows: list[int] = drawn.tolist()
    return batch[rows], {"pf_ppo/distinct_samples": float(len(set(rows)))}


def compute_pf_ppo_reweight_data(data: DataProto, reweight_method: str = "pow", weight_pow: float = 2.0) -> DataProto:
    """Draw len(data) samples with replacement, weighted by `token_level_scores` [B, R], with torch's global generator.

    Raises ConfigError for an unknown method.
    """
    settings = from_mapping(
        PolicyFiltrationConfig, {"reweight_method": reweight_method, "weight_pow": float(weight_pow)}
    )
    weights = filtration_weights(tensors_of(data)["token_level_scores"].sum(-1), settings)
    rows: list[int] = torch.multinomial(weights, len(data), replacement=True).tolist()
    drawn: DataProto = data[rows]
    return drawn
