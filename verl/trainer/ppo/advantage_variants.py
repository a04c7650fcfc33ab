"""More advantage estimators of outcomes; `advantages` has the names (`AdvantageEstimator`) and the others."""

from __future__ import annotations

import numpy as np
import torch

from verl.trainer.ppo.advantages import (
    BASELINES,
    COMPONENTS,
    EPSILON,
    SUM_PI_SQUARED,
    Groups,
    compute_grpo_outcome_advantage,
    compute_rloo_outcome_advantage,
    on_every_token,
    register_adv_est,
)
from verl.utils.torch_functional import masked_whiten
from verl.workers.config import AlgorithmConfig

Result = tuple[torch.Tensor, torch.Tensor]

register_adv_est("grpo_vectorized")(compute_grpo_outcome_advantage)


@register_adv_est("rloo_vectorized")
def compute_rloo_vectorized_outcome_advantage(
    token_level_rewards: torch.Tensor,
    response_mask: torch.Tensor,
    index: np.ndarray,
    config: AlgorithmConfig | None = None,
) -> Result:
    """RLOO, except that the advantage of a group of one is 0, as in verl 0.9.1."""
    advantages, _ = compute_rloo_outcome_advantage(token_level_rewards, response_mask, index)
    alone = (Groups(token_level_rewards, response_mask, index).sizes <= 1).unsqueeze(-1)
    advantages = torch.where(alone, 0.0, advantages)
    return advantages, advantages.clone()


@register_adv_est("gpg")
def compute_gpg_outcome_advantage(
    token_level_rewards: torch.Tensor,
    response_mask: torch.Tensor,
    index: np.ndarray,
    config: AlgorithmConfig | None = None,
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
    token_level_rewards: torch.Tensor,
    response_mask: torch.Tensor,
    index: np.ndarray,
    config: AlgorithmConfig | None = None,
) -> Result:
    """REINFORCE++ with a group's mean as baseline (arXiv:2501.03262, section 3.3), whitened over all tokens of the
    batch."""
    groups = Groups(token_level_rewards, response_mask, index)
    advantages, _ = on_every_token(groups.centred(), response_mask)
    advantages = masked_whiten(advantages, response_mask.bool())
    return advantages, advantages.clone()


@register_adv_est("opo")
def compute_opo_outcome_advantage(
    token_level_rewards: torch.Tensor,
    response_mask: torch.Tensor,
    index: np.ndarray,
    config: AlgorithmConfig | None = None,
) -> Result:
    """OPO (arXiv:2505.23585, eq. 7): score minus the group's mean score, weighted by response length."""
    groups = Groups(token_level_rewards, response_mask, index)
    lengths = response_mask.bool().sum(-1).double()
    baseline = groups.total(lengths * groups.scores) / groups.total(lengths).clamp(min=1)
    return on_every_token(groups.scores - torch.where(groups.sizes > 1, baseline, 0.0), response_mask)


@register_adv_est("grpo_passk")
def compute_grpo_passk_outcome_advantage(
    token_level_rewards: torch.Tensor,
    response_mask: torch.Tensor,
    index: np.ndarray,
    config: AlgorithmConfig | None = None,
) -> Result:
    """Pass@k as the objective (arXiv:2503.19595): the group's best response gets its score minus the second best, the
    others 0; divided by the group's deviation as in GRPO. If several share the best score, all get 0."""
    groups = Groups(token_level_rewards, response_mask, index)
    divided = (config or AlgorithmConfig()).norm_adv_by_std_in_grpo
    advantages = torch.zeros_like(groups.scores)
    for group in set(groups.group[groups.generated].tolist()):
        members = torch.nonzero((groups.group == group) & groups.generated).flatten()
        if len(members) > 1:
            best, second = groups.scores[members].topk(2)
            spread = groups.scores[members].std() + EPSILON if divided else 1.0
            advantages[members[second[0]]] = (best[0] - best[1]) / spread
    return on_every_token(advantages, response_mask)


@register_adv_est("remax", needs=(BASELINES,))
def compute_remax_outcome_advantage(
    token_level_rewards: torch.Tensor,
    reward_baselines: torch.Tensor,
    response_mask: torch.Tensor,
    config: AlgorithmConfig | None = None,
    index: np.ndarray | None = None,
) -> Result:
    """ReMax (arXiv:2310.10505, eq. 5): a token's reward still to come, minus that of a greedy response."""
    returns = _to_go(token_level_rewards, response_mask)
    return torch.where(response_mask.bool(), returns - reward_baselines.float().unsqueeze(-1), 0.0), returns


@register_adv_est("optimal_token_baseline", needs=("old_log_probs", SUM_PI_SQUARED, "rollout_is_weights"))
def compute_optimal_token_baseline_advantage(
    token_level_rewards: torch.Tensor,
    response_mask: torch.Tensor,
    index: np.ndarray,
    config: AlgorithmConfig,
    old_log_probs: torch.Tensor,
    sum_pi_squared: torch.Tensor,
    rollout_is_weights: torch.Tensor | None = None,
) -> Result:
    """Optimal token baseline (arXiv:2602.07078): the reward still to come at position t, minus its mean over the
    group's responses that have a token there. The mean is weighted by W_t, the size of the gradient up to t.

    W_t is the sum over tokens j <= t of 1 - 2 pi_j + sum pi_j^2, the squared gradient of log pi with regard to the
    logits, each times the square of the token's importance weight, if given. The longest response of a group has no
    baseline beyond the length of the second longest, as in verl 0.9.1. Any other token alone at its position is its own
    baseline: its advantage is 0. Lengths count the policy's tokens only.
    """
    mask = response_mask.bool()
    groups = Groups(token_level_rewards, response_mask, index)
    returns = _to_go(token_level_rewards, response_mask)
    energy = 1.0 - 2.0 * old_log_probs.double().exp() + sum_pi_squared.double()
    if rollout_is_weights is not None:
        energy = energy * rollout_is_weights.double().square()
    energy = torch.where(mask, torch.where(mask, energy, 0.0).cumsum(-1).clamp(min=0.0), 0.0)
    sums = torch.zeros(2, *energy.shape, dtype=torch.float64)
    sums.index_add_(1, groups.group, torch.stack([energy * returns, energy]))
    earned, total = sums[:, groups.group]
    baseline = torch.where(_beyond_the_others(groups, mask), 0.0, earned / (total + 1e-8))
    return torch.where(mask, returns - baseline.float(), 0.0), returns


def _beyond_the_others(groups: Groups, mask: torch.Tensor) -> torch.Tensor:
    """Positions [B, R] of the longest response of each group, if one is, from the length of the second longest on."""
    lengths = mask.sum(-1)
    beyond = torch.zeros_like(mask)
    for group in set(groups.group.tolist()):
        members = torch.nonzero(groups.group == group).flatten()
        ordered = lengths[members].sort(descending=True)
        second = int(ordered.values[1]) if len(members) > 1 else 0
        if ordered.values[0] > second:
            beyond[members[ordered.indices[0]], second:] = True
    return beyond


@register_adv_est("tir_optimal_token_baseline", needs=("old_log_probs", SUM_PI_SQUARED, "rollout_is_weights"))
def compute_multi_turn_optimal_token_baseline_advantage(
    token_level_rewards: torch.Tensor,
    response_mask: torch.Tensor,
    index: np.ndarray,
    config: AlgorithmConfig,
    old_log_probs: torch.Tensor,
    sum_pi_squared: torch.Tensor,
    rollout_is_weights: torch.Tensor | None = None,
) -> Result:
    """`optimal_token_baseline` for responses with tools: compares the policy's n-th token with the n-th of the other
    responses, without counting the tools' outputs."""
    mask = response_mask.bool()
    order = (~mask).byte().argsort(dim=-1, stable=True)
    returns = _to_go(token_level_rewards, response_mask)
    ahead = returns.gather(-1, order)
    advantages, _ = compute_optimal_token_baseline_advantage(
        ahead - torch.nn.functional.pad(ahead[:, 1:], (0, 1)),
        mask.gather(-1, order),
        index,
        config,
        old_log_probs.gather(-1, order),
        sum_pi_squared.gather(-1, order),
        None if rollout_is_weights is None else rollout_is_weights.gather(-1, order),
    )
    return torch.zeros_like(advantages).scatter(-1, order, advantages), returns


@register_adv_est("gdpo", needs=(COMPONENTS,))
def compute_gdpo_outcome_advantage(
    token_level_rewards: torch.Tensor,
    response_mask: torch.Tensor,
    index: np.ndarray,
    config: AlgorithmConfig,
    reward_components: torch.Tensor,
) -> Result:
    """GDPO (arXiv:2601.05242): normalises each reward component as GRPO does; whitens their weighted sum."""
    weights = config.gdpo_reward_weights or [1.0] * reward_components.shape[1]
    total = torch.zeros(response_mask.shape, dtype=torch.float32)
    for weight, component in zip(weights, reward_components.unbind(1), strict=True):
        advantages, _ = compute_grpo_outcome_advantage(component.unsqueeze(-1), response_mask, index, config=config)
        total += weight * advantages
    whitened = masked_whiten(total, response_mask.bool())
    return whitened, whitened.clone()


def _to_go(token_level_rewards: torch.Tensor, response_mask: torch.Tensor) -> torch.Tensor:
    """The sum of rewards from each token on, [B, R]; 0 where the mask is."""
    total = token_level_rewards.float().flip(-1).cumsum(-1).flip(-1)
    return torch.where(response_mask.bool(), total, 0.0)
