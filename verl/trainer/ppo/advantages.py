"""Advantage estimators, by the name that `algorithm.adv_estimator` gives them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol, TypeVar

import numpy as np
import torch

from verl.utils.registry import Registry
from verl.utils.torch_functional import masked_whiten
from verl.workers.config import AlgorithmConfig

EPSILON = 1e-6


class AdvantageEstimator(Protocol):
    """Called on the driver, once per batch of B sequences.

    token_level_rewards float [B, R]; response_mask [B, R], 1 on tokens the policy generated; index [B], equal for the
    responses to one prompt. Returns (advantages, returns), float32 [B, R], 0 where the mask is 0.
    """

    def __call__(
        self,
        token_level_rewards: torch.Tensor,
        response_mask: torch.Tensor,
        index: np.ndarray,
        config: AlgorithmConfig,
    ) -> tuple[torch.Tensor, torch.Tensor]: ...


class ValueAdvantageEstimator(Protocol):
    """As `AdvantageEstimator`, for one that needs a critic: `values` float32 [B, R], before each token."""

    def __call__(
        self,
        token_level_rewards: torch.Tensor,
        response_mask: torch.Tensor,
        index: np.ndarray,
        config: AlgorithmConfig,
        *,
        values: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]: ...


Estimator = TypeVar("Estimator", bound=Callable[..., tuple[torch.Tensor, torch.Tensor]])
ESTIMATORS: Registry[Any] = Registry("algorithm.adv_estimator")
_NEED_VALUES: set[str] = set()


def register_adv_est(name: str, *, needs_values: bool = False) -> Callable[[Estimator], Estimator]:
    """Decorator that makes an `AdvantageEstimator` available as `algorithm.adv_estimator=name`.

    With `needs_values` it is a `ValueAdvantageEstimator`, and a run that names it has a critic.
    """
    register: Callable[[Estimator], Estimator] = ESTIMATORS.register(name)

    def add(estimator: Estimator) -> Estimator:
        register(estimator)
        if needs_values:
            _NEED_VALUES.add(name)
        return estimator

    return add


def get_adv_estimator_fn(name: str) -> Any:
    """An `AdvantageEstimator`, or if `needs_values(name)` a `ValueAdvantageEstimator`.

    Raises ConfigError for a name that nobody registered.
    """
    return ESTIMATORS.get(name)


def needs_values(name: str) -> bool:
    return name in _NEED_VALUES


@register_adv_est("grpo")
def compute_grpo_outcome_advantage(
    token_level_rewards: torch.Tensor, response_mask: torch.Tensor, index: np.ndarray, config: AlgorithmConfig
) -> tuple[torch.Tensor, torch.Tensor]:
    """GRPO with outcome rewards (DeepSeekMath, arXiv:2402.03300): (score - group mean) / (group std + 1e-6).

    The score of a sequence is the sum of its token rewards, the standard deviation that of a sample (n - 1). With
    `norm_adv_by_std_in_grpo=false` there is no division (Dr. GRPO, arXiv:2503.20783). A group of one has no baseline:
    its advantage is its score.
    """
    groups = Groups(token_level_rewards, response_mask, index)
    centred = groups.centred()
    if config.norm_adv_by_std_in_grpo:
        squares = groups.total((groups.scores - groups.means) ** 2)
        std = (squares / (groups.sizes - 1).clamp(min=1)).sqrt()
        centred = torch.where(groups.sizes > 1, centred / (std + EPSILON), centred)
    return on_every_token(centred, response_mask)


@register_adv_est("rloo")
def compute_rloo_outcome_advantage(
    token_level_rewards: torch.Tensor, response_mask: torch.Tensor, index: np.ndarray, config: AlgorithmConfig
) -> tuple[torch.Tensor, torch.Tensor]:
    """RLOO (arXiv:2402.14740): the score minus the mean score of the *other* responses to the same prompt.

    That equals n / (n - 1) * (score - group mean). A group of one has no baseline: its advantage is its score.
    """
    groups = Groups(token_level_rewards, response_mask, index)
    left_out = groups.sizes / (groups.sizes - 1).clamp(min=1) * (groups.scores - groups.means)
    return on_every_token(torch.where(groups.sizes > 1, left_out, groups.scores), response_mask)


@register_adv_est("reinforce_plus_plus")
def compute_reinforce_plus_plus_outcome_advantage(
    token_level_rewards: torch.Tensor, response_mask: torch.Tensor, index: np.ndarray, config: AlgorithmConfig
) -> tuple[torch.Tensor, torch.Tensor]:
    """REINFORCE++ (arXiv:2501.03262): discounted returns per token, whitened over all tokens of the batch.

    G_t = r_t + gamma * G_(t+1), where only tokens of the policy discount: a tool's output between two turns passes the
    return through unchanged.
    """
    mask = response_mask.bool()
    rewards = token_level_rewards.float()
    returns = torch.zeros_like(rewards)
    running = torch.zeros_like(rewards[:, 0])
    for position in reversed(range(rewards.shape[1])):
        running = rewards[:, position] + torch.where(mask[:, position], config.gamma, 1.0) * running
        returns[:, position] = running
    returns = torch.where(mask, returns, 0.0)
    return masked_whiten(returns, mask), returns


@register_adv_est("gae", needs_values=True)
def compute_gae_advantage_return(
    token_level_rewards: torch.Tensor,
    response_mask: torch.Tensor,
    index: np.ndarray,
    config: AlgorithmConfig,
    *,
    values: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Generalised advantages (arXiv:1506.02438), whitened over all tokens of the batch; returns are those plus values.

    d_t = r_t + gamma * V_(t+1) - V_t and A_t = d_t + gamma * lam * A_(t+1), where t + 1 is the next token of the
    policy: a tool's output between two turns is passed over, and a reward that stands on it counts for the token
    before it. Nothing follows the last token.
    """
    mask = response_mask.bool()
    rewards, values = token_level_rewards.float(), values.float()
    advantages = torch.zeros_like(rewards)
    following, advantage, passed_over = (torch.zeros_like(rewards[:, 0]) for _ in range(3))
    for position in reversed(range(rewards.shape[1])):
        own, reward, value = mask[:, position], rewards[:, position] + passed_over, values[:, position]
        surprise = reward + config.gamma * following - value
        advantage = torch.where(own, surprise + config.gamma * config.lam * advantage, advantage)
        following = torch.where(own, value, following)
        passed_over = torch.where(own, 0.0, reward)
        advantages[:, position] = torch.where(own, advantage, 0.0)
    returns = torch.where(mask, advantages + values, 0.0)
    return masked_whiten(advantages, mask), returns


class Groups:
    """Scores [B] of sequences, and the size and mean of each one's group, [B].

    Sequences without a token of the policy (aborted requests, padding) are in no group: an outcome that the policy did
    not produce must not move the baseline of those it did.
    """

    group: torch.Tensor
    """The number of each sequence's group, [B]."""
    generated: torch.Tensor
    """Whether the sequence has a token of the policy, [B]."""

    def __init__(self, token_level_rewards: torch.Tensor, response_mask: torch.Tensor, index: np.ndarray) -> None:
        if len(index) != len(token_level_rewards):
            raise ValueError(f"{len(index)} group ids for {len(token_level_rewards)} sequences")
        self.generated = response_mask.bool().any(-1)
        # Float64: equal rewards must centre to zero, not to a rounding error divided by an epsilon.
        self.scores = token_level_rewards.double().sum(-1)
        self.group = torch.from_numpy(np.unique(np.asarray(index).astype(str), return_inverse=True)[1]).to(
            self.scores.device
        )
        self.sizes = self.total(torch.ones_like(self.scores))
        self.means = self.total(self.scores) / self.sizes.clamp(min=1)

    def centred(self) -> torch.Tensor:
        """The scores minus the means of their groups, [B]. A group of one has no baseline."""
        return self.scores - torch.where(self.sizes > 1, self.means, 0.0)

    def total(self, values: torch.Tensor) -> torch.Tensor:
        """The sum of `values` [B] over each sequence's group, [B]."""
        counted = torch.where(self.generated, values, 0.0)
        sums = torch.zeros_like(values).index_add_(0, self.group, counted)
        return sums[self.group]


def on_every_token(per_sequence: torch.Tensor, response_mask: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    advantages = torch.where(response_mask.bool(), per_sequence.float().unsqueeze(-1), 0.0)
    return advantages, advantages.clone()
