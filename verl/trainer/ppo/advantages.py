"""Advantage estimators, registered under the names that `algorithm.adv_estimator` accepts."""

from __future__ import annotations

from collections.abc import Callable, Collection
from enum import StrEnum
from typing import Any, Protocol, TypeVar

import numpy as np
import torch

from verl.checkpoint_engine.support.registry import Registry, require_keywords
from verl.utils.torch_functional import masked_whiten
from verl.workers.config import AlgorithmConfig

EPSILON = 1e-6


class AdvantageEstimator(StrEnum):
    """verl's names of estimators. Configuring one that is not registered raises ConfigError."""

    GAE = "gae"
    GRPO = "grpo"
    REINFORCE_PLUS_PLUS = "reinforce_plus_plus"
    REINFORCE_PLUS_PLUS_BASELINE = "reinforce_plus_plus_baseline"
    REMAX = "remax"
    RLOO = "rloo"
    OPO = "opo"
    GRPO_PASSK = "grpo_passk"
    GPG = "gpg"
    RLOO_VECTORIZED = "rloo_vectorized"
    GRPO_VECTORIZED = "grpo_vectorized"
    OPTIMAL_TOKEN_BASELINE = "optimal_token_baseline"
    TIR_OPTIMAL_TOKEN_BASELINE = "tir_optimal_token_baseline"
    GDPO = "gdpo"


class EstimatorFunction(Protocol):
    """Called on the driver, once per batch of B sequences, by keyword.

    token_level_rewards float [B, R]; response_mask [B, R], 1 on tokens the policy generated; index [B], equal for the
    responses to one prompt; config is the section `algorithm`. Returns (advantages, returns), float32 [B, R], 0 where
    the mask is 0.
    """

    def __call__(
        self,
        *,
        token_level_rewards: torch.Tensor,
        response_mask: torch.Tensor,
        index: np.ndarray,
        config: AlgorithmConfig,
    ) -> tuple[torch.Tensor, torch.Tensor]: ...


class ValueEstimatorFunction(Protocol):
    """An `EstimatorFunction` that needs a critic: it also gets its `values`, float32 [B, R], one before each token."""

    def __call__(
        self,
        *,
        token_level_rewards: torch.Tensor,
        response_mask: torch.Tensor,
        index: np.ndarray,
        config: AlgorithmConfig,
        values: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]: ...


Estimator = TypeVar("Estimator", bound=Callable[..., tuple[torch.Tensor, torch.Tensor]])
KEY = "algorithm.adv_estimator"
ARGUMENTS = ("token_level_rewards", "response_mask", "index", "config")
ESTIMATORS: Registry[Any] = Registry(KEY)
ADV_ESTIMATOR_REGISTRY = ESTIMATORS.functions
_NEEDS: dict[str, tuple[str, ...]] = {}
BASELINES, SUM_PI_SQUARED, COMPONENTS = "reward_baselines", "sum_pi_squared", "reward_components"


def register_adv_est(
    name: str, *, needs_values: bool = False, needs: Collection[str] = ()
) -> Callable[[Estimator], Estimator]:
    """Decorator that makes an `EstimatorFunction` available as `algorithm.adv_estimator=name`.

    With `needs_values` it is a `ValueEstimatorFunction`, and its runs have a critic. `needs` names further arguments:
    tensors of the batch, None if absent. These are `old_log_probs`, `rollout_is_weights`, and three that are computed
    only if needed: `reward_baselines` [B], rewards of greedy responses; `sum_pi_squared` [B, R], summed over the
    vocabulary; `reward_components` [B, K], the reward function's values under `algorithm.gdpo_reward_keys`.
    """
    register: Callable[[Estimator], Estimator] = ESTIMATORS.register(str(name))

    def add(estimator: Estimator) -> Estimator:
        register(estimator)
        _NEEDS[str(name)] = (*needs, *(("values",) if needs_values else ()))
        return estimator

    return add


def get_adv_estimator_fn(name_or_enum: str) -> Any:
    """An `EstimatorFunction`, or if `needs_values(name)` a `ValueEstimatorFunction`.

    Raises ConfigError for a name that is not registered, and for a function with another signature.
    """
    name = str(name_or_enum)
    function = ESTIMATORS.get(name)
    require_keywords(function, (*ARGUMENTS, *needed_by(name)), f"{KEY}={name}")
    return function


def needed_by(name: str) -> tuple[str, ...]:
    """The names of the tensors that an estimator needs beside the common arguments."""
    return _NEEDS.get(str(name), ())


def needs_values(name: str) -> bool:
    return "values" in needed_by(name)


@register_adv_est("grpo")
def compute_grpo_outcome_advantage(
    token_level_rewards: torch.Tensor,
    response_mask: torch.Tensor,
    index: np.ndarray,
    epsilon: float = EPSILON,
    norm_adv_by_std_in_grpo: bool | None = None,
    config: AlgorithmConfig | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """GRPO with outcome rewards (DeepSeekMath, arXiv:2402.03300): (score - group mean) / (group std + 1e-6).

    A sequence's score is the sum of its token rewards; the standard deviation is that of a sample (n - 1). With
    `norm_adv_by_std_in_grpo=false`, here or in `config`, there is no division (Dr. GRPO, arXiv:2503.20783). A group of
    one has no baseline: its advantage is its score.
    """
    groups = Groups(token_level_rewards, response_mask, index)
    centred = groups.centred()
    if norm_adv_by_std_in_grpo is None:
        norm_adv_by_std_in_grpo = (config or AlgorithmConfig()).norm_adv_by_std_in_grpo
    if norm_adv_by_std_in_grpo:
        squares = groups.total((groups.scores - groups.means) ** 2)
        std = (squares / (groups.sizes - 1).clamp(min=1)).sqrt()
        centred = torch.where(groups.sizes > 1, centred / (std + epsilon), centred)
    return on_every_token(centred, response_mask)


@register_adv_est("rloo")
def compute_rloo_outcome_advantage(
    token_level_rewards: torch.Tensor,
    response_mask: torch.Tensor,
    index: np.ndarray,
    epsilon: float = EPSILON,
    config: AlgorithmConfig | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """RLOO (arXiv:2402.14740): the score minus the mean score of the *other* responses to the same prompt.

    That equals n / (n - 1) * (score - group mean). A group of one has no baseline: its advantage is its score.
    """
    groups = Groups(token_level_rewards, response_mask, index)
    left_out = groups.sizes / (groups.sizes - 1).clamp(min=1) * (groups.scores - groups.means)
    return on_every_token(torch.where(groups.sizes > 1, left_out, groups.scores), response_mask)


@register_adv_est("reinforce_plus_plus")
def compute_reinforce_plus_plus_outcome_advantage(
    token_level_rewards: torch.Tensor,
    response_mask: torch.Tensor,
    config: AlgorithmConfig | None = None,
    *,
    index: np.ndarray | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """REINFORCE++ (arXiv:2501.03262): discounted returns per token, whitened over all tokens of the batch.

    G_t = r_t + gamma * G_(t+1), where only the policy's tokens discount: the output of a tool passes the return on
    unchanged.
    """
    gamma = (config or AlgorithmConfig()).gamma
    mask = response_mask.bool()
    rewards = token_level_rewards.float()
    returns = torch.zeros_like(rewards)
    running = torch.zeros_like(rewards[:, 0])
    for position in reversed(range(rewards.shape[1])):
        running = rewards[:, position] + torch.where(mask[:, position], gamma, 1.0) * running
        returns[:, position] = running
    returns = torch.where(mask, returns, 0.0)
    return masked_whiten(returns, mask), returns


@register_adv_est("gae", needs_values=True)
def compute_gae_advantage_return(
    token_level_rewards: torch.Tensor,
    values: torch.Tensor,
    response_mask: torch.Tensor,
    gamma: float | None = None,
    lam: float | None = None,
    *,
    index: np.ndarray | None = None,
    config: AlgorithmConfig | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Generalised advantages (arXiv:1506.02438), whitened over all tokens of the batch; returns are those plus values.

    d_t = r_t + gamma * V_(t+1) - V_t and A_t = d_t + gamma * lam * A_(t+1), where t + 1 is the policy's next token. A
    tool's output is skipped; a reward on it counts for the policy's token before it. Behind the last token, V and A are
    0. `gamma` and `lam` default to those of `config`.
    """
    config = config or AlgorithmConfig()
    gamma, lam = config.gamma if gamma is None else gamma, config.lam if lam is None else lam
    mask = response_mask.bool()
    rewards, values = token_level_rewards.float(), values.float()
    advantages = torch.zeros_like(rewards)
    following, advantage, passed_over = (torch.zeros_like(rewards[:, 0]) for _ in range(3))
    for position in reversed(range(rewards.shape[1])):
        own, reward, value = mask[:, position], rewards[:, position] + passed_over, values[:, position]
        surprise = reward + gamma * following - value
        advantage = torch.where(own, surprise + gamma * lam * advantage, advantage)
        following = torch.where(own, value, following)
        passed_over = torch.where(own, 0.0, reward)
        advantages[:, position] = torch.where(own, advantage, 0.0)
    returns = torch.where(mask, advantages + values, 0.0)
    return masked_whiten(advantages, mask), returns


class Groups:
    """Scores [B] of sequences, and the size and mean of each one's group, [B].

    Sequences without a token of the policy (aborted requests, padding) are in no group: they must not move the baseline
    of the others.
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
