"""The `algorithm`, `custom_reward_function` and `reward_model` sections."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from verl.utils.config import Section, option, section
from verl.workers.config.reward_model import RewardRolloutConfig, ServedModelConfig


@dataclass(frozen=True, kw_only=True)
class KLControlConfig(Section):
    """Coefficient of the KL penalty in the reward."""

    type: str = option("fixed", "fixed, or adapted towards target_kl", choices=("fixed", "adaptive"))
    kl_coef: float = option(0.001, "the coefficient, or its first value", least=0)
    horizon: int = option(10000, "samples over which the adaptive controller corrects", least=1)
    target_kl: float = option(0.1, "KL that the adaptive controller aims at", above=0)


@dataclass(frozen=True, kw_only=True)
class RolloutCorrectionConfig(Section):
    """Importance sampling between the rollout engine's policy and the trainer's."""

    rollout_is: str | None = option(
        None, "importance weights per token, per sequence, or none", choices=(None, "token", "sequence")
    )
    rollout_is_threshold: float = option(2.0, "weights are truncated at this value", above=0)


@dataclass(frozen=True, kw_only=True)
class AlgorithmConfig(Section):
    """Advantages and KL."""

    adv_estimator: str = option(
        "grpo",
        "gae, grpo, grpo_passk, rloo, opo, gpg, reinforce_plus_plus, reinforce_plus_plus_baseline, or a name "
        "registered with register_adv_est (verl: gae)",
    )
    gamma: float = option(1.0, "discount factor", least=0, most=1)
    lam: float = option(1.0, "decay of generalised advantages: 0 trusts the critic, 1 the rewards", least=0, most=1)
    norm_adv_by_std_in_grpo: bool = option(True, "divide group-centred rewards by the group's standard deviation")
    use_kl_in_reward: bool = option(False, "subtract a KL penalty against the reference policy from token rewards")
    kl_penalty: str = option("kl", "KL estimator for it", choices=("kl", "abs", "mse", "low_var_kl"))
    kl_ctrl: KLControlConfig = section(KLControlConfig)
    rollout_correction: RolloutCorrectionConfig = section(RolloutCorrectionConfig)


@dataclass(frozen=True, kw_only=True)
class CustomRewardFunctionConfig(Section):
    """A reward function of the user's own.

    `compute_score(data_source, solution_str, ground_truth, extra_info=None, **kwargs) -> float | dict with "score"`
    """

    path: str | None = option(
        None, "Python file with the function; null: verl.utils.reward_score.default_compute_score"
    )
    name: str = option("compute_score", "function name in that file")
    reward_kwargs: dict[str, Any] = option({}, "keyword arguments passed to every call")


@dataclass(frozen=True, kw_only=True)
class OverlongBufferConfig(Section):
    """A penalty that grows over the last tokens before the longest response."""

    enable: bool = option(False, "with reward_manager=dapo")
    len: int = option(0, "tokens over which it grows", least=0)
    penalty_factor: float = option(0.0, "the penalty of a response of max_resp_len tokens", least=0)
    log: bool = option(False, "add it to the metrics, as reward_extra/overlong_reward and reward_extra/overlong")


@dataclass(frozen=True, kw_only=True)
class RewardKwargsConfig(Section):
    """What a reward manager takes."""

    max_resp_len: int | None = option(None, "longest response that has no more than the whole penalty", least=1)
    overlong_buffer_cfg: OverlongBufferConfig = section(OverlongBufferConfig)


@dataclass(frozen=True, kw_only=True)
class RewardModelConfig(Section):
    """Reward computation."""

    enable: bool = option(False, "serve reward_model.model beside the run, which scores or is asked")
    enable_resource_pool: bool = option(
        False, "it has devices of its own, nnodes * n_gpus_per_node of them; false: those of the trainer"
    )
    nnodes: int = option(0, "machines with enable_resource_pool=true", least=0)
    n_gpus_per_node: int = option(8, "devices of each of these machines", least=1)
    model: ServedModelConfig = section(ServedModelConfig)
    rollout: RewardRolloutConfig = section(RewardRolloutConfig)
    reward_manager: str = option(
        "naive",
        "naive, prime: what the reward function says; dapo: less the penalty of reward_kwargs.overlong_buffer_cfg; or "
        "a name registered in external_lib",
    )
    reward_kwargs: RewardKwargsConfig = section(RewardKwargsConfig)
    num_workers: int = option(1, "processes that score responses", least=1)
    timeout_s: float = option(
        30.0,
        "deadline for scoring one response; when it passes, the response gets 0 and is named in a warning",
        above=0,
    )
    keep_special_tokens: bool = option(
        False, "the reward function sees special tokens, such as <think> in some vocabularies, but not the end token"
    )
