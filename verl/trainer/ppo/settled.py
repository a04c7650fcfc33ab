"""Fills in what a configuration leaves open, while a run is checked. Nothing changes it afterwards."""

from __future__ import annotations

from dataclasses import replace

from verl.utils import builtin
from verl.utils.config import ConfigError
from verl.workers.config import CriticConfig, PPOConfig


def of_whole_batches(config: PPOConfig) -> PPOConfig:
    """`config` for a loop that generates the prompts of a step together. Raises ConfigError for other batches."""
    prompts, generated = config.data.train_batch_size, config.data.gen_batch_size
    if prompts == 0:
        raise ConfigError(
            "data.train_batch_size must be positive, not 0: only fully asynchronous runs compute it, from "
            "async_training.require_batches"
        )
    if generated not in (None, prompts) and not config.algorithm.filter_groups.enable:
        raise ConfigError(
            f"data.gen_batch_size={generated}, but whole training batches are generated, of "
            f"data.train_batch_size={prompts} prompts: leave it out, or set algorithm.filter_groups.enable=true"
        )
    return config


def settled(config: PPOConfig) -> PPOConfig:
    """Copy values of other sections into those that engines get: lengths, directories of traces, checks."""
    rollout = config.actor_rollout_ref.rollout
    profiler = replace(rollout.profiler, save_path=rollout.profiler.save_path or config.profile_directory)
    rollout = replace(
        rollout,
        prompt_length=rollout.prompt_length or config.data.max_prompt_length,
        response_length=rollout.response_length or config.data.max_response_length,
        checkpoint_engine={"check_engine": config.checkpoint_engine.check_engine},  # all that an engine needs of it
        profiler=profiler,
    )
    return replace(config, actor_rollout_ref=replace(config.actor_rollout_ref, rollout=rollout))


def total_steps(config: PPOConfig, steps_per_epoch: int) -> int:
    files = config.data.train_files
    if config.trainer.total_training_steps is not None:
        return config.trainer.total_training_steps
    if isinstance(files, str) and builtin.is_builtin(files):
        return builtin.TRAINING_STEPS
    return config.trainer.total_epochs * steps_per_epoch


def scheduled(config: PPOConfig, steps: int) -> PPOConfig:
    """Fill in the learning rates, which depend on the model, and the schedules, which depend on the run's length."""
    actor = config.actor_rollout_ref.actor
    optim = actor.optim
    if optim.lr is None:
        model = config.actor_rollout_ref.model
        of_builtin = builtin.LORA_LEARNING_RATE if model.lora_rank else builtin.LEARNING_RATE
        optim = replace(optim, lr=of_builtin if builtin.is_builtin(model.path) else optim.peak_lr)
    if optim.total_training_steps <= 0:
        optim = replace(optim, total_training_steps=steps)
    policy = replace(config.actor_rollout_ref, actor=replace(actor, optim=optim))
    return replace(config, actor_rollout_ref=policy, critic=_scheduled_critic(config, steps))


def _scheduled_critic(config: PPOConfig, steps: int) -> CriticConfig:
    optim = config.critic.optim
    if optim.lr is None and builtin.is_builtin(config.critic.model.path or config.actor_rollout_ref.model.path):
        optim = replace(optim, lr=builtin.CRITIC_LEARNING_RATE)
    if optim.total_training_steps <= 0:
        optim = replace(optim, total_training_steps=steps)
    return replace(config.critic, optim=optim)
