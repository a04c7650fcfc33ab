"""Advantage estimators of outcomes beside those in `advantages`, whose `AdvantageEstimator` they are."""

from __future__ import annotations

import numpy as np
import torch

from verl.trainer.ppo.advantages import (
    EPSILON,
    Groups,
    compute_rloo_outcome_advantage,
    on_every_token,
    register_adv_est,
)
from verl.utils.torch_functional import masked_whiten
from verl.workers.config import AlgorithmConfig

Result = tuple[torch.Tensor, torch.Tensor]

register_adv_est("rloo_vectorized")(compute_rloo_outcome_advantage)


@register_adv_est("gpg")
def compute_gpg_outcome_advantage(
    token_level_rewards: torch.Tensor, response_mask: torch.Tensor, index: np.ndarray, config: AlgorithmConfig
) -> Result:
    """GPG (arXiv:2504.02546): score minus group mean, times sequences / sequences with a score other than 0.

    The factor keeps the gradient's size when most responses earn nothing. A group of one has no baseline.
    """
    groups = Groups(token_level_rewards, response_mask, index)
    earning = groups.generated & (groups.scores != 0)
    factor = groups.generated.sum() / earning.sum().clamp(min=1)
    return on_every_token(factor * groups.centred(), response_mask)


@register_adv_est("reinforce_plus_plus_baseline")
def compute_reinforce_plus_plus_baseline_outcome_advantage(
    token_level_rewards: torch.Tensor, response_mask: torch.Tensor, index: np.ndarray, config: AlgorithmConfig
) -> Result:
    """REINFORCE++ with a group's mean as baseline (arXiv:2501.03262, section 3.3), whitened over all tokens of the
    batch."""
    groups = Groups(token_level_rewards, response_mask, index)
    advantages, _ = on_every_token(groups.centred(), response_mask)
    advantages = masked_whiten(advantages, response_mask.bool())
    return advantages, advantages.clone()


@register_adv_est("opo")
def compute_opo_outcome_advantage(
    token_level_rewards: torch.Tensor, response_mask: torch.Tensor, index: np.ndarray, config: AlgorithmConfig
) -> Result:
    """OPO (arXiv:2505.23585, eq. 7): score minus the group's mean score, in which responses count by their length."""
    groups = Groups(token_level_rewards, response_mask, index)
    lengths = response_mask.bool().sum(-1).double()
    baseline = groups.total(lengths * groups.scores) / groups.total(lengths).clamp(min=1)
    return on_every_token(groups.scores - torch.where(groups.sizes > 1, baseline, 0.0), response_mask)


@register_adv_est("grpo_passk")
def compute_grpo_passk_outcome_advantage(
    token_level_rewards: torch.Tensor, response_mask: torch.Tensor, index: np.ndarray, config: AlgorithmConfig
) -> Result:
    """Pass@k as the objective (arXiv:2503.19595): the best response of a group gets what it is ahead of the second, the
    others get 0; divided by the group's standard deviation as GRPO's are. Of several that are best none is ahead."""
    groups = Groups(token_level_rewards, response_mask, index)
    advantages = torch.zeros_like(groups.scores)
    for group in set(groups.group[groups.generated].tolist()):
        members = torch.nonzero((groups.group == group) & groups.generated).flatten()
        if len(members) > 1:
            best, second = groups.scores[members].topk(2)
            spread = groups.scores[members].std() + EPSILON if config.norm_adv_by_std_in_grpo else 1.0
            advantages[members[second[0]]] = (best[0] - best[1]) / spread
    return on_every_token(advantages, response_mask)
