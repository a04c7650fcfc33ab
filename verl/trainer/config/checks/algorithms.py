"""Checks whether the keys of an algorithm are consistent."""

from __future__ import annotations

from collections.abc import Iterator

from verl.workers.config import PPOConfig


def algorithm_keys(config: PPOConfig) -> Iterator[str]:
    """Keys that need each other."""
    algorithm, actor, rollout = config.algorithm, config.actor_rollout_ref.actor, config.actor_rollout_ref.rollout
    if algorithm.kl_ctrl.type == "adaptive" and not algorithm.use_kl_in_reward:
        yield "algorithm.kl_ctrl.type=adaptive has no effect with algorithm.use_kl_in_reward=false: set one of them"
    if rollout.temperature <= 0:
        yield (
            f"actor_rollout_ref.rollout.temperature={rollout.temperature} must be above 0 for training; "
            "rollout.val_kwargs.temperature is that of validation"
        )
    if not rollout.calculate_log_probs:
        for used, key in (
            (actor.use_rollout_log_probs, "actor_rollout_ref.actor.use_rollout_log_probs=true"),
            (
                algorithm.rollout_correction.rollout_is is not None,
                f"algorithm.rollout_correction.rollout_is={algorithm.rollout_correction.rollout_is}",
            ),
            (algorithm.rollout_correction.rejects, "algorithm.rollout_correction.rollout_rs"),
        ):
            if used:
                yield f"{key} needs actor_rollout_ref.rollout.calculate_log_probs=true, not false"
    yield from _truncated(config)
    replay = actor.megatron.router_replay.mode
    if replay != "disabled" and actor.strategy != "megatron":
        yield (
            f"actor_rollout_ref.actor.megatron.router_replay.mode={replay} needs actor_rollout_ref.actor.strategy="
            f"megatron, not {actor.strategy}, whose engine chooses experts again in every pass"
        )
    if (replay == "R3") != rollout.enable_rollout_routing_replay:
        yield (
            f"actor_rollout_ref.actor.megatron.router_replay.mode={replay} with actor_rollout_ref.rollout."
            f"enable_rollout_routing_replay={str(rollout.enable_rollout_routing_replay).lower()}: R3 takes the experts "
            "that the rollout engine returns, and nothing else does"
        )
    if replay == "R2" and actor.use_rollout_log_probs:
        yield (
            "actor_rollout_ref.actor.megatron.router_replay.mode=R2 takes the experts from the pass of old log-probs, "
            "which algorithm.rollout_correction.bypass_mode=true leaves out"
        )
    if algorithm.rollout_correction.loss_type == "reinforce" and not actor.use_rollout_log_probs:
        yield (
            "algorithm.rollout_correction.loss_type=reinforce weighs with the rollout engine's log-probs: it needs "
            "algorithm.rollout_correction.bypass_mode=true"
        )


def _truncated(config: PPOConfig) -> Iterator[str]:
    """Ratios of the trainer's probabilities, of the whole vocabulary, to those of what sampling leaves of it."""
    correction, rollout = config.algorithm.rollout_correction, config.actor_rollout_ref.rollout
    sampling = [f"top_k={rollout.top_k}"] if rollout.top_k > 0 else []
    sampling += [f"top_p={rollout.top_p}"] if rollout.top_p < 1 else []
    sampling += [] if rollout.do_sample else ["do_sample=false"]
    used = {
        "algorithm.rollout_correction.bypass_mode=true": config.actor_rollout_ref.actor.use_rollout_log_probs,
        f"algorithm.rollout_correction.rollout_is={correction.rollout_is}": correction.rollout_is is not None,
        f"algorithm.rollout_correction.rollout_rs={correction.rollout_rs}": bool(correction.rejections),
        "algorithm.rollout_correction.rollout_token_veto_threshold": correction.rejects,  # and no rollout_rs
    }
    by = next((key for key, is_used in used.items() if is_used), None)
    if sampling and by and not correction.accept_truncated_sampling:
        yield (
            f"{by} compares trainer and rollout probabilities, but actor_rollout_ref.rollout.{sampling[0]} normalises "
            "the rollout's over a truncated vocabulary. Equal weights then have ratios below 1. Sample from the whole "
            "vocabulary (top_k=-1, top_p=1, do_sample=true), or set "
            "algorithm.rollout_correction.accept_truncated_sampling=true to train with these ratios"
        )


def warnings(config: PPOConfig) -> Iterator[str]:
    """Warnings about settings that have less effect than they seem to."""
    validation = config.actor_rollout_ref.rollout.val_kwargs
    if validation.n > 1 and (not validation.do_sample or validation.temperature == 0):
        greedy = "temperature=0.0" if validation.do_sample else "do_sample=false"
        yield (
            f"actor_rollout_ref.rollout.val_kwargs.n={validation.n} with {greedy}: the {validation.n} responses to a "
            "prompt are identical, so best and maj are meaningless; set val_kwargs.do_sample=true and "
            "val_kwargs.temperature"
        )
    elif validation.temperature > 0 and not validation.do_sample:
        yield (
            f"actor_rollout_ref.rollout.val_kwargs.temperature={validation.temperature:g} has no effect, as validation "
            "is greedy with do_sample=false; verl 0.9 samples all the same: for that set val_kwargs.do_sample=true"
        )
    teaches_alone = config.distillation.enabled and not config.distillation.distillation_loss.use_task_rewards
    if config.algorithm.adv_estimator == "grpo" and config.actor_rollout_ref.rollout.n == 1 and not teaches_alone:
        yield (
            "actor_rollout_ref.rollout.n=1 with algorithm.adv_estimator=grpo: one response is compared with no other, "
            "so its advantage is its score; set rollout.n to 2 or more"
        )


def estimators(config: PPOConfig) -> Iterator[str]:
    """The settings that estimators, and the filters of their samples, need."""
    algorithm, actor, rollout = config.algorithm, config.actor_rollout_ref.actor, config.actor_rollout_ref.rollout
    filters = algorithm.filter_groups
    if filters.enable and not filters.metric:
        yield "algorithm.filter_groups.enable=true needs algorithm.filter_groups.metric, like acc"
    if filters.enable and filters.metric == "seq_final_reward" and algorithm.use_kl_in_reward:
        yield (
            "algorithm.filter_groups.metric=seq_final_reward with algorithm.use_kl_in_reward=true: groups are chosen "
            "before the KL penalty is known; take seq_reward"
        )
    keys, weights = algorithm.gdpo_reward_keys, algorithm.gdpo_reward_weights
    if algorithm.adv_estimator == "gdpo" and not keys:
        yield (
            "algorithm.adv_estimator=gdpo needs algorithm.gdpo_reward_keys, the components in the reward function's "
            "dict, like [format_reward,accuracy_reward]"
        )
    if weights and len(weights) != len(keys):
        yield f"algorithm.gdpo_reward_weights={weights} are {len(weights)} for {len(keys)} algorithm.gdpo_reward_keys"
    by_energy = ("optimal_token_baseline", "tir_optimal_token_baseline")
    if algorithm.adv_estimator in by_energy and actor.use_rollout_log_probs:
        yield (
            f"algorithm.adv_estimator={algorithm.adv_estimator} needs probabilities of the whole vocabulary, which the "
            "rollout engine's log-probs are not: algorithm.rollout_correction.bypass_mode=false"
        )
    if algorithm.adv_estimator in ("rloo", "rloo_vectorized", "grpo_passk", *by_energy, "gdpo") and rollout.n < 2:
        yield (
            f"algorithm.adv_estimator={algorithm.adv_estimator} compares the responses to one prompt with each other: "
            f"actor_rollout_ref.rollout.n={rollout.n} must be at least 2"
        )
