"""Whether training engine and checkpoint engine can do what the job needs."""

from __future__ import annotations

from collections.abc import Iterator

from verl.utils.config import ConfigError
from verl.workers.config import PPOConfig


def reference(config: PPOConfig) -> Iterator[str]:
    """Megatron's process groups belong to the process, and the reference policy shares the actor's."""
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


def checkpoint_engine(config: PPOConfig) -> Iterator[str]:
    """The backend exists, its options are right, and it can do what this job needs. Runs after `user_modules`."""
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
