"""Checks whether batches and sequences divide over the trainer ranks."""

from __future__ import annotations

from collections.abc import Iterator

from verl.workers.config import FSDPConfig, HFModelConfig, PPOConfig
from verl.workers.config.critic import CriticModelConfig


def batch_sizes(config: PPOConfig) -> Iterator[str]:
    """A step's batch divides evenly into optimizer steps, and each of these over the ranks."""
    trainer, policy = config.trainer, config.actor_rollout_ref
    prompts, responses = config.data.train_batch_size, policy.rollout.n
    mini, ranks = policy.actor.ppo_mini_batch_size, trainer.world_size
    if mini * responses < ranks:
        yield (
            f"actor_rollout_ref.actor.ppo_mini_batch_size={mini} * actor_rollout_ref.rollout.n={responses} = "
            f"{mini * responses} sequences are fewer than {ranks} trainer ranks "
            f"(trainer.nnodes={trainer.nnodes} * trainer.n_gpus_per_node={trainer.n_gpus_per_node})"
        )
    if prompts % mini:
        yield (
            f"actor_rollout_ref.actor.ppo_mini_batch_size={mini} does not divide data.train_batch_size={prompts}"
            " (both count prompts)"
        )


def micro_batch_sizes(config: PPOConfig) -> Iterator[str]:
    policy = config.actor_rollout_ref
    for path, section in (("rollout", policy.rollout), ("ref", policy.ref)):
        if not section.log_prob_use_dynamic_bsz and not section.log_prob_micro_batch_size_per_gpu:
            yield (
                f"actor_rollout_ref.{path}.log_prob_micro_batch_size_per_gpu must be set when "
                f"actor_rollout_ref.{path}.log_prob_use_dynamic_bsz=false"
            )


def lengths(config: PPOConfig) -> Iterator[str]:
    rollout = config.actor_rollout_ref.rollout
    for ours, theirs, name in (
        (rollout.prompt_length, config.data.max_prompt_length, "prompt_length"),
        (rollout.response_length, config.data.max_response_length, "response_length"),
    ):
        if ours is not None and ours != theirs:
            yield f"actor_rollout_ref.rollout.{name}={ours} differs from data.max_{name}={theirs}: leave it null"
    longest = config.data.max_prompt_length + config.data.max_response_length
    if rollout.max_model_len is not None and rollout.max_model_len < longest:
        yield (
            f"actor_rollout_ref.rollout.max_model_len={rollout.max_model_len} is less than data.max_prompt_length + "
            f"data.max_response_length = {longest}"
        )
    actor, ref = config.actor_rollout_ref.actor, config.actor_rollout_ref.ref
    budgets = {
        "actor.ppo_max_token_len_per_gpu": (actor.use_dynamic_bsz, actor.ppo_max_token_len_per_gpu, actor.fsdp_config),
        "rollout.log_prob_max_token_len_per_gpu": (
            rollout.log_prob_use_dynamic_bsz,
            rollout.log_prob_max_token_len_per_gpu,
            actor.fsdp_config,
        ),
        "ref.log_prob_max_token_len_per_gpu": (
            ref.log_prob_use_dynamic_bsz,
            ref.log_prob_max_token_len_per_gpu,
            ref.fsdp_config,
        ),
    }
    told: set[int] = set()
    for name, (used, budget, fsdp) in budgets.items():
        sharers = 1 if actor.strategy == "megatron" else fsdp.ulysses_sequence_parallel_size
        if used and budget * sharers < longest and budget not in told:
            told.add(budget)  # the others follow the actor's
            yield (
                f"actor_rollout_ref.{name}={budget}{times(sharers)} is less than one sequence: data.max_prompt_length "
                f"+ data.max_response_length = {longest}"
            )


def times(sharers: int) -> str:
    return f" * ulysses_sequence_parallel_size={sharers}" if sharers > 1 else ""


def sharing(config: PPOConfig) -> Iterator[str]:
    """Ranks that share a sequence form groups that divide the trainer ranks."""
    policy, ranks, where = config.actor_rollout_ref, config.trainer.world_size, "actor_rollout_ref"
    told: set[int] = set()
    for name, section in (("actor", policy.actor.fsdp_config), ("ref", policy.ref.fsdp_config)):
        size = section.ulysses_sequence_parallel_size
        if size not in told:
            told.add(size)  # the reference policy's follows the actor's
            key = f"{where}.{name}.fsdp_config"
            yield from sharer_problems(key, section, f"{where}.model", policy.model, policy.actor.strategy, ranks)


def sharer_problems(
    path: str, fsdp: FSDPConfig, model_path: str, model: HFModelConfig | CriticModelConfig, strategy: str, ranks: int
) -> Iterator[str]:
    if strategy == "megatron" and model.require_remove_padding:
        yield f"{model_path}.require_remove_padding=true is for fsdp and fsdp2; with megatron sequences have rows"
    key = f"{path}.ulysses_sequence_parallel_size={fsdp.ulysses_sequence_parallel_size}"
    if fsdp.ulysses_sequence_parallel_size == 1:
        return
    if strategy == "megatron":
        yield f"{key} is for fsdp and fsdp2; strategy=megatron has tensor_model_parallel_size"
        return
    if ranks % fsdp.ulysses_sequence_parallel_size:
        yield f"{key} does not divide {ranks} trainer ranks (trainer.nnodes * trainer.n_gpus_per_node)"
    if not model.use_remove_padding:
        yield f"{key} needs {model_path}.use_remove_padding=true: ranks share sequences that are in one row"
