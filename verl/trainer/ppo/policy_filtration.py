"""Policy filtration: responses are learned from more or less often, by how far their scores can be trusted.

PF-PPO, "Policy Filtration for RLHF to Mitigate Noise in Reward Models", arXiv:2409.06957: rewards are most reliable
where they are high or low, so an update sees a batch that is drawn anew from the one that was generated.
"""

from __future__ import annotations

import torch

from verl.protocol import DataProto, tensors_of
from verl.trainer.ppo.even_batches import without_padding
from verl.utils.config import from_mapping
from verl.workers.config.algorithm import PolicyFiltrationConfig

TIMES_AS_LIKELY = 4.0
"""The best response as any other, with max_random."""


def filtration_weights(scores: torch.Tensor, settings: PolicyFiltrationConfig) -> torch.Tensor:
    """How likely each response is to be drawn, up to a factor, from the scores [B] of a batch.

    pow: |score| ** weight_pow. max_min: the highest and the lowest score alike, others never. max_random: the highest
    score, and any other less often. Where all would be 0 they are alike.
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
    """As many samples as `batch` has beside padding, drawn from them with replacement, and metrics of the draw.

    `seed`: the same batch is drawn again for a step that is made again.
    """
    batch = without_padding(batch)
    weights = filtration_weights(tensors_of(batch)["token_level_scores"].sum(-1), settings)
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.multinomial(weights, len(batch), replacement=True, generator=generator)
    rows: list[int] = drawn.tolist()
    return batch[rows], {"pf_ppo/distinct_samples": float(len(set(rows)))}


def compute_pf_ppo_reweight_data(data: DataProto, reweight_method: str = "pow", weight_pow: float = 2.0) -> DataProto:
    """As many samples as `data` has, drawn from them by `token_level_scores` [B, R] with torch's generator.

    Raises ConfigError for a method that is not known.
    """
    settings = from_mapping(
        PolicyFiltrationConfig, {"reweight_method": reweight_method, "weight_pow": float(weight_pow)}
    )
    weights = filtration_weights(tensors_of(data)["token_level_scores"].sum(-1), settings)
    rows: list[int] = torch.multinomial(weights, len(data), replacement=True).tolist()
    drawn: DataProto = data[rows]
    return drawn
