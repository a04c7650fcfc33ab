"""The `algorithm`, `custom_reward_function` and `reward_model` sections."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from verl.utils.config import ConfigError, Section, option, section
from verl.workers.config.reward_model import RewardRolloutConfig, ServedModelConfig


@dataclass(frozen=True, kw_only=True)
class KLControlConfig(Section):
    """Coefficient of the KL penalty in the reward."""

    type: str = option("fixed", "fixed, or adapted towards target_kl", choices=("fixed", "adaptive"))
    kl_coef: float = option(0.001, "the coefficient, or its first value", least=0)
    horizon: int = option(10000, "samples over which the adaptive controller corrects", least=1)
    target_kl: float = option(0.1, "KL that the adaptive controller aims at", above=0)


REJECTIONS = (
    *("token_k1", "token_k2", "token_k3", "seq_sum_k1", "seq_sum_k2", "seq_sum_k3"),
    *("seq_mean_k1", "seq_mean_k2", "seq_mean_k3", "seq_max_k2", "seq_max_k3"),
)


@dataclass(frozen=True, kw_only=True)
class RolloutCorrectionConfig(Section):
    """Importance sampling between the rollout engine's policy and the trainer's, and rejection of what is far off."""

    rollout_is: str | None = option(
        None, "importance weights per token, per sequence, or none", choices=(None, "token", "sequence")
    )
    rollout_is_threshold: str | float = option(
        2.0, "weights are truncated at this value; lower_upper, like 0.5_5.0: those outside are 0 (IcePop)", above=0
    )
    rollout_is_batch_normalize: bool = option(
        False, "weights are divided by their mean over the batch; with loss_type=reinforce, over the micro-batch"
    )
    rollout_rs: str | None = option(
        None, f"what is not learned from, one or several with commas between them, of {', '.join(REJECTIONS)}"
    )
    rollout_rs_threshold: str | float | None = option(
        None,
        "bounds of rollout_rs, one or one for each: k1 takes ratios lower_upper, like 0.999_1.001, or an upper one, "
        "whose inverse is the lower; k2 and k3 take a largest divergence",
        above=0,
    )
    rollout_token_veto_threshold: float | None = option(
        None, "a sequence with a token whose ratio is below this is not learned from", above=0
    )
    accept_truncated_sampling: bool = option(
        False,
        "with rollout.top_k or top_p the rollout engine's log-probs are those of a truncated distribution, the "
        "trainer's are not, and ratios are below 1 at equal weights; true: train with these ratios all the same",
    )
    loss_type: str = option(
        "ppo_clip",
        "with actor.use_rollout_log_probs: the loss of actor.policy_loss, or reinforce, the plain policy gradient with "
        "importance weights",
        choices=("ppo_clip", "reinforce"),
    )

    def __post_init__(self) -> None:
        _ = self.is_bounds, self.rejections

    @property
    def is_bounds(self) -> tuple[float | None, float]:
        """(lower, upper) bounds of importance weights. Without a lower bound the weights are truncated."""
        name = "rollout_is_threshold"
        lower, upper = _bounds(self.rollout_is_threshold, name)
        if upper <= 0:
            raise ConfigError(f"{name}={self.rollout_is_threshold} must be above 0")
        return lower, upper

    @property
    def rejections(self) -> tuple[tuple[str, float | None, float], ...]:
        """(name, lower, upper) of each of `rollout_rs`: ratios for k1, else an upper divergence alone."""
        key = "rollout_rs"
        given = self.rollout_rs_threshold
        if not self.rollout_rs:
            if given is not None:
                raise ConfigError(f"{key}_threshold={given} needs {key}, like seq_mean_k1")
            return ()
        names = [name.strip() for name in self.rollout_rs.split(",")]
        if unknown := sorted(set(names) - set(REJECTIONS)):
            raise ConfigError(f"{key}={self.rollout_rs}: {unknown[0]!r} is none of {', '.join(REJECTIONS)}")
        if given is None:
            raise ConfigError(f"{key}={self.rollout_rs} needs {key}_threshold, like 0.5_2.0")
        thresholds = str(given).split(",")
        if len(thresholds) not in (1, len(names)):
            raise ConfigError(f"{key}_threshold={given} has {len(thresholds)} bounds for {len(names)} of {key}")
        thresholds = thresholds * len(names) if len(thresholds) == 1 else thresholds
        return tuple(_rejection(name, text.strip(), key) for name, text in zip(names, thresholds, strict=True))

    @property
    def rejects(self) -> bool:
        return bool(self.rejections) or self.rollout_token_veto_threshold is not None


def _rejection(name: str, text: str, key: str) -> tuple[str, float | None, float]:
    lower, upper = _bounds(text, f"{key}_threshold")
    if not name.endswith("k1"):
        if lower is not None or upper <= 0:
            raise ConfigError(f"{key}_threshold={text}: {name} takes one divergence above 0")
        return name, None, upper
    lower = 1.0 / upper if lower is None and upper > 0 else lower
    if lower is None or not 0 < lower < upper:
        raise ConfigError(f"{key}_threshold={text}: {name} takes ratios 0 < lower < upper, like 0.5_2.0")
    return name, lower, upper


def _bounds(value: float | str, key: str) -> tuple[float | None, float]:
    """Of a number, or of two with _ between them."""
    if isinstance(value, (int, float)):
        return None, float(value)
    lower, _, upper = value.rpartition("_")
    try:
        numbers = (float(lower) if lower else None), float(upper)
    except ValueError as exc:
        raise ConfigError(f"{key}={value}: write a number, or two like 0.5_2.0") from exc
    if not all(number is None or math.isfinite(number) for number in numbers):
        raise ConfigError(f"{key}={value} must be finite")
    return numbers


@dataclass(frozen=True, kw_only=True)
class FilterGroupsConfig(Section):
    """Dynamic sampling: prompts are drawn until a batch is full of groups whose responses differ."""

    enable: bool = option(False, "leave out groups whose responses all have the same metric")
    metric: str | None = option(
        "reward", "reward, acc, score, seq_reward, seq_final_reward, or a number in the dict of the reward function"
    )
    max_num_gen_batches: int = option(
        0,
        "batches of data.gen_batch_size prompts for one step (fully_async_main: as many as a step takes); then the run "
        "ends. 0 and -1: one pass over the data",
        least=-1,
    )


@dataclass(frozen=True, kw_only=True)
class PolicyFiltrationConfig(Section):
    """PF-PPO: updates see a batch that is drawn anew, by scores, from the one that was generated."""

    reweight_method: str = option(
        "pow",
        "likely are: pow: high absolute scores; max_min: the highest and lowest score of the batch alone; max_random: "
        "the highest, four times as likely as any other",
        choices=("pow", "max_min", "max_random"),
    )
    weight_pow: float = option(2.0, "pow: the power of absolute scores", least=0)


@dataclass(frozen=True, kw_only=True)
class AlgorithmConfig(Section):
    """Advantages and KL."""

    adv_estimator: str = option(
        "grpo",
        "gae, grpo, grpo_passk, rloo, remax, opo, gpg, gdpo, optimal_token_baseline, tir_optimal_token_baseline, "
        "reinforce_plus_plus, reinforce_plus_plus_baseline, or a name registered with register_adv_est; null: grpo "
        "with a built-in model and built-in data, else verl's gae",
        follows=True,
    )
    gamma: float = option(1.0, "discount factor", least=0, most=1)
    lam: float = option(1.0, "decay of generalised advantages: 0 trusts the critic, 1 the rewards", least=0, most=1)
    norm_adv_by_std_in_grpo: bool = option(True, "divide group-centred rewards by the group's standard deviation")
    use_kl_in_reward: bool = option(False, "subtract a KL penalty against the reference policy from token rewards")
    kl_penalty: str = option("kl", "KL estimator for it", choices=("kl", "abs", "mse", "low_var_kl"))
    kl_ctrl: KLControlConfig = section(KLControlConfig)
    rollout_correction: RolloutCorrectionConfig = section(RolloutCorrectionConfig)
    filter_groups: FilterGroupsConfig = section(FilterGroupsConfig)
    use_pf_ppo: bool = option(False, "policy filtration, as pf_ppo says")
    pf_ppo: PolicyFiltrationConfig = section(PolicyFiltrationConfig)
    gdpo_reward_keys: list[str] = option([], "gdpo: the numbers of the reward function's dict that are its components")
    gdpo_reward_weights: list[float] = option([], "gdpo: the weight of each of them; empty: 1")


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

    max_resp_len: int | None = option(
        None, "longest response that has no more than the whole penalty; null: data.max_response_length", least=1
    )
    overlong_buffer_cfg: OverlongBufferConfig = section(OverlongBufferConfig)


@dataclass(frozen=True, kw_only=True)
class RewardModelConfig(Section):
    """Reward computation."""

    enable: bool = option(False, "serve reward_model.model beside the run; it scores, or the reward function calls it")
    enable_resource_pool: bool = option(
        False, "it has devices of its own, nnodes * n_gpus_per_node of them; false: those of the trainer"
    )
    nnodes: int = option(0, "machines with enable_resource_pool=true", least=0)
    n_gpus_per_node: int = option(8, "devices of each of these machines", least=1)
    model: ServedModelConfig = section(ServedModelConfig)
    rollout: RewardRolloutConfig = section(RewardRolloutConfig)
    reward_manager: str = option(
        "naive",
        "naive, prime, remote: what the reward function says; dapo: less the penalty of "
        "reward_kwargs.overlong_buffer_cfg; or a name registered in external_lib",
    )
    reward_kwargs: RewardKwargsConfig = section(RewardKwargsConfig)
    num_workers: int = option(1, "processes that score responses", least=1)
    timeout_s: float = option(
        30.0,
        "deadline for scoring one response; when it passes, the response gets 0 and is named in a warning",
        above=0,
    )
    max_failed: float = option(
        0.5,
        "share of the samples of a step, or of a validation, whose scoring passed the deadline or ended its process; "
        "beyond it the run ends",
        least=0,
        most=1,
    )
    keep_special_tokens: bool = option(
        False, "the reward function sees special tokens, such as <think> in some vocabularies, but not the end token"
    )
