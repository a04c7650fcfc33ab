"""Checks whether training engine and checkpoint engine support the job."""

from __future__ import annotations

from collections.abc import Iterator

from verl.utils.config import ConfigError
from verl.utils.model import ATTENTION, EXACT
from verl.workers.config import PPOConfig


def reference(config: PPOConfig) -> Iterator[str]:
    """With Megatron the reference policy shares the actor's process groups, so both need the same ones."""
    policy = config.actor_rollout_ref
    if policy.actor.strategy == "megatron" and (other := policy.ref.megatron.differences(policy.actor.megatron)):
        yield (
            f"actor_rollout_ref.ref.megatron: {', '.join(other)} differs from actor_rollout_ref.actor.megatron, whose "
            "ranks and groups the reference policy shares; leave it null"
        )


def lora(config: PPOConfig) -> Iterator[str]:
    policy = config.actor_rollout_ref
    if policy.model.lora_rank and policy.actor.strategy == "fsdp":
        yield (
            f"actor_rollout_ref.model.lora_rank={policy.model.lora_rank} needs actor_rollout_ref.actor.strategy=fsdp2 "
            "or megatron, not fsdp, which trains whole models"
        )


def exact(config: PPOConfig) -> Iterator[str]:
    """Settings with which `rollout.exact` is untested, or that use other kernels or weights."""
    from verl.utils.device import resolve_device

    policy = config.actor_rollout_ref
    if not policy.rollout.exact:
        return
    rollout, fsdp, model = policy.rollout, policy.actor.fsdp_config, policy.model
    here, of_fsdp, of_model = "rollout", "actor.fsdp_config", "model"
    needed: list[tuple[str, object, tuple[object, ...]]] = [
        (f"{here}.name", rollout.name, ("vllm",)),
        (f"{here}.dtype", rollout.dtype, ("bfloat16",)),
        (f"{here}.quantization", rollout.quantization, (None,)),
        (f"{here}.tensor_model_parallel_size", rollout.tensor_model_parallel_size, (1,)),
        (f"{here}.expert_parallel_size", rollout.expert_parallel_size, (1,)),
        (f"{here}.top_k", rollout.top_k, (-1,)),
        (f"{here}.top_p", rollout.top_p, (1.0,)),
        (f"{here}.engine_kwargs.vllm", rollout.engine_kwargs.get("vllm") or {}, ({},)),
        ("actor.strategy", policy.actor.strategy, ("fsdp2", "fsdp")),
        (f"{of_fsdp}.dtype", fsdp.dtype, ("bfloat16",)),
        (f"{of_fsdp}.ulysses_sequence_parallel_size", fsdp.ulysses_sequence_parallel_size, (1,)),
        (f"{of_model}.lora_rank", model.lora_rank, (0,)),
        (f"{of_model}.trust_remote_code", model.trust_remote_code, (False,)),
        (f"{of_model}.override_config.{ATTENTION}", model.override_config.get(ATTENTION), (EXACT,)),
    ]
    if not rollout.do_sample:  # of greedy answers the engine tells the log-probs at temperature 1
        needed.append((f"{here}.temperature", rollout.temperature, (1.0,)))
    start = "actor_rollout_ref.rollout.exact=true needs"
    if (device := resolve_device(config.trainer.device)) != "cpu":
        yield f"{start} trainer.device=cpu, not {device}, on which it has not been run"
    for key, value, right in needed:
        if value not in right:
            yield f"{start} actor_rollout_ref.{key}={' or '.join(map(str, right))}, not {value}"


def mismatch_probe(config: PPOConfig) -> Iterator[str]:
    """The probe compares log-probs of both sides."""
    policy, frequency = config.actor_rollout_ref, config.trainer.mismatch_probe_freq
    if frequency < 1:
        return
    here = f"trainer.mismatch_probe_freq={frequency} needs actor_rollout_ref"
    if not policy.rollout.calculate_log_probs:
        yield f"{here}.rollout.calculate_log_probs=true: it compares them with the trainer's"
    if policy.actor.use_rollout_log_probs:
        yield f"{here}.actor.use_rollout_log_probs=false: with true the trainer computes none of its own"


def kv_across_versions(config: PPOConfig) -> Iterator[str]:
    rollout, pause_mode = config.actor_rollout_ref.rollout, config.checkpoint_engine.pause_mode
    here = f"actor_rollout_ref.rollout.kv_across_versions={rollout.kv_across_versions}"
    if rollout.kv_across_versions == "clear":
        return
    if rollout.name != "vllm":
        yield f"{here} needs actor_rollout_ref.rollout.name=vllm, not {rollout.name}, which clears its cache"
    if not rollout.enable_prefix_caching:
        yield f"{here} needs actor_rollout_ref.rollout.enable_prefix_caching=true"
    if rollout.exact:
        yield f"{here}: with rollout.exact tokens have the bits of one version; use kv_across_versions=clear"
    if rollout.enable_rollout_routing_replay:
        yield f"{here}: cached tokens have the experts of an older version; routing replay needs clear"
    if rollout.kv_across_versions == "keep" and pause_mode != "keep":
        yield f"{here} needs checkpoint_engine.pause_mode=keep, not {pause_mode}, which ends requests before a sync"
    if rollout.kv_across_versions == "salt" and pause_mode == "keep":
        yield f"{here}: requests that checkpoint_engine.pause_mode=keep freezes keep their cache; say so with keep"


def checkpoint_engine(config: PPOConfig) -> Iterator[str]:
    """The backend exists, its options are valid, and it supports this job. Runs after `user_modules`."""
    from verl.checkpoint_engine.registry import resolve_backend
    from verl.utils.device import resolve_device

    try:
        needs = resolve_backend(config.checkpoint_engine).capabilities
    except ConfigError as exc:
        yield str(exc)
        return
    backend, device = config.checkpoint_engine.backend, resolve_device(config.trainer.device)
    separate = config.trainer.placement == "separate"
    if needs.same_host and separate and (config.trainer.nnodes > 1 or device != "cpu"):
        yield (
            f"checkpoint_engine.backend={backend} needs rollout engines on the trainer's machines, and "
            f"trainer.placement=separate with trainer.nnodes={config.trainer.nnodes} on {device} puts them elsewhere"
        )
    if device not in needs.device_types:
        yield (
            f"checkpoint_engine.backend={backend} reads weights from {', '.join(needs.device_types)}, "
            f"not from trainer.device={device}"
        )
