"""Checks whether a needed critic is configured, and fits batches and ranks."""

from __future__ import annotations

from collections.abc import Iterator

from verl.trainer.config.checks.sizes import sharer_problems, times
from verl.workers.config import PPOConfig


def critic_of(config: PPOConfig) -> Iterator[str]:
    """Runs after `user_modules`, which may have registered the estimator."""
    from verl.trainer.ppo.needs import needs_critic

    critic, name, ranks = config.critic, config.algorithm.adv_estimator, config.trainer.world_size
    if not needs_critic(config):
        if critic.enable:
            yield f"critic.enable=true, but algorithm.adv_estimator={name} uses no critic; gae does"
        if config.trainer.critic_warmup:
            yield f"trainer.critic_warmup={config.trainer.critic_warmup} needs a critic; adv_estimator={name} has none"
        return
    if critic.enable is False:
        yield f"algorithm.adv_estimator={name} needs a critic, and critic.enable=false"
    mini = critic.ppo_mini_batch_size or config.actor_rollout_ref.actor.ppo_mini_batch_size
    if config.data.train_batch_size % mini:
        yield f"critic.ppo_mini_batch_size={mini} does not divide data.train_batch_size={config.data.train_batch_size}"
    if mini * config.actor_rollout_ref.rollout.n < ranks:
        yield (
            f"critic.ppo_mini_batch_size={mini} * actor_rollout_ref.rollout.n={config.actor_rollout_ref.rollout.n} "
            f"sequences are fewer than {ranks} trainer ranks"
        )
    longest = config.data.max_prompt_length + config.data.max_response_length
    actor = config.actor_rollout_ref.actor
    follows = actor.use_dynamic_bsz and critic.ppo_max_token_len_per_gpu == actor.ppo_max_token_len_per_gpu
    sharers = 1 if critic.strategy == "megatron" else critic.fsdp.ulysses_sequence_parallel_size
    follows = follows and sharers == actor.fsdp_config.ulysses_sequence_parallel_size
    if critic.use_dynamic_bsz and critic.ppo_max_token_len_per_gpu * sharers < longest and not follows:
        yield (
            f"critic.ppo_max_token_len_per_gpu={critic.ppo_max_token_len_per_gpu}{times(sharers)} is less than one "
            f"sequence: data.max_prompt_length + data.max_response_length = {longest}"
        )
    yield from sharer_problems("critic.fsdp", critic.fsdp, "critic.model", critic.model, critic.strategy, ranks)
    size = critic.fsdp.fsdp_size
    if size != -1 and (size <= 0 or ranks % size):
        yield f"critic.fsdp.fsdp_size={size} does not divide {ranks} trainer ranks"
