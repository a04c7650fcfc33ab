"""Which models beside the policy a run has."""

from __future__ import annotations

from verl.workers.config import PPOConfig

GRPO = "grpo"
"""The default estimator. Its name cannot be registered again, so its needs are known without the others."""


def needs_reference(config: PPOConfig) -> bool:
    return config.algorithm.use_kl_in_reward or config.actor_rollout_ref.actor.use_kl_loss


def needs_critic(config: PPOConfig) -> bool:
    if config.algorithm.adv_estimator == GRPO:
        return False
    from verl.trainer.ppo.core_algos import needs_values  # torch

    return needs_values(config.algorithm.adv_estimator)
