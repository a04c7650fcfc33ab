"""An advantage estimator: the score minus the mean score of the whole batch, whatever the prompt.

python -m verl.trainer.main_ppo actor_rollout_ref.model.external_lib=examples.custom_advantage \
    algorithm.adv_estimator=batch_mean
"""

from __future__ import annotations

import numpy as np
import torch

from verl.trainer.ppo.core_algos import register_adv_est
from verl.workers.config import AlgorithmConfig


@register_adv_est("batch_mean")
def compute_batch_mean_advantage(
    token_level_rewards: torch.Tensor, response_mask: torch.Tensor, index: np.ndarray, config: AlgorithmConfig
) -> tuple[torch.Tensor, torch.Tensor]:
    """See `EstimatorFunction`. `index` (the group of each sequence) is not needed here."""
    mask = response_mask.bool()
    generated = mask.any(-1)  # aborted and padding sequences have no token of the policy: they move no baseline
    scores = token_level_rewards.sum(-1)
    baseline = scores[generated].mean() if generated.any() else scores.new_zeros(())
    advantages = torch.where(mask, (scores - baseline).unsqueeze(-1), 0.0)
    return advantages, advantages.clone()
