"""Describes a run in a few lines, for `--check` and the run's log."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from verl.trainer.fleet.counts import num_replicas, num_reward_engines, num_teacher_engines
from verl.trainer.ppo.needs import needs_critic, needs_reference
from verl.workers.config import PPOConfig, RolloutConfig


def lines(
    config: PPOConfig, device: str, steps: int | None, resume_from: Path | None = None, memory: str | None = None
) -> Iterator[str]:
    """Lines `name: value` that describe the run. `steps` is the length of the run, and `memory` the line on shared
    memory, if known."""
    policy, data, trainer = config.actor_rollout_ref, config.data, config.trainer
    yield f"model: {policy.model.path}; data: {_listed(data.train_files)}; held out: {_listed(data.val_files)}"
    yield (
        f"trainer: {trainer.world_size} ranks ({trainer.nnodes} x {trainer.n_gpus_per_node}) on {device}, "
        f"{policy.actor.strategy}{_cuts(config)}; reference policy: {_yes(needs_reference(config))}; "
        f"critic: {config.critic.strategy if needs_critic(config) else 'no'}"
    )
    yield f"learning: {_learning(config)}"
    yield from in_force(config, device)
    yield f"sampling: {_sampling(config.actor_rollout_ref.rollout)}"
    yield f"weights: checkpoint_engine.backend={config.checkpoint_engine.backend}"
    if memory is not None:
        yield memory
    length = trainer.total_training_steps or steps
    begins = f", from {resume_from}" if resume_from else ""
    yield (
        f"length: {f'{length} steps' if length else f'{trainer.total_epochs} epochs'}{begins}; "
        f"output: {trainer.output_dir}"
    )


def in_force(config: PPOConfig, device: str) -> Iterator[str]:
    """Lines on the settings in force that decide how a run learns, whether given, default or derived."""
    data, trainer, actor = config.data, config.trainer, config.actor_rollout_ref.actor
    rollout = config.actor_rollout_ref.rollout
    yield (
        f"rollout: {rollout.name}, {num_replicas(config, device)} replicas of {rollout.replica_ranks} "
        f"ranks{_dealt(rollout)}, {trainer.placement}; {rollout.n} responses per prompt{_tools(config)}"
    )
    shared = " of every rank" if actor.fsdp_config.ulysses_sequence_parallel_size > 1 else ""
    micro = (
        f"up to {actor.ppo_max_token_len_per_gpu} tokens{shared}"
        if actor.use_dynamic_bsz
        else f"{actor.ppo_micro_batch_size_per_gpu} sequences"
    )
    yield (
        f"batch: {data.train_batch_size} prompts per step, {actor.ppo_mini_batch_size} per optimizer step, "
        f"micro-batches of {micro}; prompts of {data.max_prompt_length}, responses of {data.max_response_length} tokens"
    )
    yield (
        f"algorithm: {config.algorithm.adv_estimator}, loss {actor.policy_loss.loss_mode} ({actor.loss_agg_mode}), "
        f"rewards {config.reward_model.reward_manager}"
    )
    if rollout.exact:
        yield "exact: trainer and engine compute with the same operators, and give tokens the same bits"
    if rollout.kv_across_versions != "clear":
        yield (
            f"kv_across_versions: {rollout.kv_across_versions}: tokens after a sync may attend to keys and values of "
            "older weights, so their log-probs are those of no version; importance ratios correct for that, too"
        )
    if trainer.full_determinism:
        yield (
            "full_determinism: the same settings and hardware give the same bits. Not covered: tools and rewards that "
            "answer differently or too late, and requests that an agent loop makes in any order"
        )
    if rollout.quantization is not None:
        yield f"quantization: {rollout.quantization}{_correction(config)}"
    if config.reward_model.enable:
        served = config.reward_model
        yield (
            f"reward model: {served.model.path} by {served.rollout.name}, {num_reward_engines(config, device)} engines "
            f"of {served.rollout.tensor_model_parallel_size} ranks, on "
            f"{'devices of its own' if served.enable_resource_pool else 'the devices of the trainer'}"
        )
    if config.distillation.enabled:
        yield from _teachers(config, device)


def _teachers(config: PPOConfig, device: str) -> Iterator[str]:
    loss = config.distillation.distillation_loss
    several = len(config.distillation.teachers) > 1
    for name, teacher in sorted(config.distillation.teachers.items()):
        of = f", for {config.distillation.teacher_key}={teacher.key}" if several else ""
        yield (
            f"teacher {name}: {teacher.model_path}, {num_teacher_engines(config, teacher, device)} engines of "
            f"{teacher.inference.tensor_model_parallel_size} ranks on devices of their own{of}"
        )
    tokens = f" of {loss.topk} tokens" if loss.uses_topk else ""
    way = "policy gradient" if loss.use_policy_gradient else "its own gradient"
    beside = f"{loss.distillation_loss_coef} times beside" if loss.use_task_rewards else "in the place of"
    yield f"distillation: {loss.loss_mode}{tokens} by {way}, {beside} the policy loss"


def _cuts(config: PPOConfig) -> str:
    if config.actor_rollout_ref.actor.strategy != "megatron":
        sharers = config.actor_rollout_ref.actor.fsdp_config.ulysses_sequence_parallel_size
        return f" (sequences shared by {sharers} ranks)" if sharers > 1 else ""
    cut = config.actor_rollout_ref.actor.megatron
    return (
        f" (TP {cut.tensor_model_parallel_size}, PP {cut.pipeline_model_parallel_size}, "
        f"EP {cut.expert_model_parallel_size})"
    )


def _correction(config: PPOConfig) -> str:
    """What makes up for responses that are sampled from other probabilities than those that are trained."""
    by_ratio = config.actor_rollout_ref.actor.use_rollout_log_probs
    if by_ratio or config.algorithm.rollout_correction.rollout_is is not None:
        return ", which rollout correction accounts for"
    return (
        "; responses are sampled from rounded weights, without correction: "
        "algorithm.rollout_correction.rollout_is=token would"
    )


def _dealt(rollout: RolloutConfig) -> str:
    """What becomes of experts and of data-parallel ranks."""
    if rollout.data_ranks > 1:
        return (
            f" (TP {rollout.tensor_model_parallel_size}, DP {rollout.data_ranks}, EP {rollout.replica_ranks}: experts "
            "are dealt out over all of them)"
        )
    dealt = f" (EP {rollout.replica_ranks})" if rollout.expert_parallel_size > 1 else ""
    own = " (each of data_parallel_size is a replica of its own)" if rollout.data_parallel_size > 1 else ""
    return dealt + own


def _tools(config: PPOConfig) -> str:
    turns = config.actor_rollout_ref.rollout.multi_turn
    return f", several turns, tools: {turns.tool_config_path or 'none'}" if turns.enable else ""


def _learning(config: PPOConfig) -> str:
    """Rate, schedule, what is trained, and in which precision."""
    actor, model = config.actor_rollout_ref.actor, config.actor_rollout_ref.model
    optim, warm_up = actor.optim, ""
    if optim.lr_warmup_steps > 0:
        warm_up = f" after {optim.lr_warmup_steps} steps of warm-up"
    elif optim.lr_warmup_steps < 0 and optim.lr_warmup_steps_ratio > 0:
        warm_up = f" after a warm-up of {optim.lr_warmup_steps_ratio:g} of all steps"
    trained = f"LoRA of rank {model.lora_rank}" if model.lora_rank else "all weights"
    kept = actor.megatron.model_dtype if actor.strategy == "megatron" else actor.fsdp_config.model_dtype
    computed = actor.megatron.dtype if actor.strategy == "megatron" else actor.fsdp_config.dtype
    return (
        f"lr {optim.peak_lr:g}, {optim.lr_scheduler_type}{warm_up}; {trained}, kept in {kept}, computed in {computed}; "
        f"engine in {config.actor_rollout_ref.rollout.dtype}"
    )


def _sampling(rollout: RolloutConfig) -> str:
    """In training and in validation; of the model's own generation_config.json only the end tokens count."""
    held_out = rollout.val_kwargs
    greedy = (
        "greedy" if not held_out.do_sample or held_out.temperature == 0 else f"temperature {held_out.temperature:g}"
    )
    return (
        f"temperature {rollout.temperature:g}, top_p {rollout.top_p:g}, top_k {rollout.top_k}; validation: {greedy}, "
        f"{held_out.n} per prompt; of the model's generation_config.json the end tokens alone"
    )


def _listed(files: str | list[str]) -> str:
    """Of many, the first three."""
    names = [files] if isinstance(files, str) else files
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "") or "none"


def _yes(value: bool) -> str:
    return "yes" if value else "no"
