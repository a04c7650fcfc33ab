"""Checks whether the reward model can be served."""

from __future__ import annotations

from collections.abc import Iterator

from verl.utils.config import ConfigError
from verl.workers.config import PPOConfig


def rewards(config: PPOConfig) -> Iterator[str]:
    if config.reward_model.reward_kwargs.overlong_buffer_cfg.enable:
        from verl.workers.reward_manager import overlong_penalty

        try:
            overlong_penalty(config.reward_model, config.data.max_response_length)
        except ConfigError as exc:
            yield str(exc)
    yield from _reward_model(config)


def _reward_model(config: PPOConfig) -> Iterator[str]:
    from verl.utils.device import resolve_device

    served, trainer = config.reward_model, config.trainer
    if not served.enable:
        return
    if served.enable_resource_pool and not served.nnodes:
        yield "reward_model.enable_resource_pool=true needs reward_model.nnodes, 1 or more"
    parallel = served.rollout.tensor_model_parallel_size
    devices = served.n_gpus_per_node if served.enable_resource_pool else trainer.n_gpus_per_node
    if resolve_device(trainer.device) != "cpu" and devices % parallel:
        yield (
            f"reward_model.rollout.tensor_model_parallel_size={parallel} does not divide the {devices} devices of a "
            "machine that serve the reward model"
        )
    shared = not served.enable_resource_pool and served.rollout.free_cache_engine
    if served.rollout.name == "sglang" and shared and resolve_device(trainer.device) != "cpu":
        yield (
            "reward_model.rollout.name=sglang keeps its memory: set reward_model.enable_resource_pool=true, for "
            "devices of its own, or reward_model.rollout.free_cache_engine=false"
        )
    if served.model.path is None:
        yield "reward_model.enable=true needs reward_model.model.path"
