"""Actor ranks and rollout workers on CPUs, under PyPI verl's own worker groups and its own manager."""

from __future__ import annotations

from typing import Any

import torch
from verl_sync.for_verl import backend

from verl.checkpoint_engine import CheckpointEngineRegistry, CheckpointEngineWorker
from verl.single_controller.base import Worker
from verl.single_controller.base.decorator import Dispatch, register
from verl.single_controller.ray import RayClassWithInitArgs, RayResourcePool, RayWorkerGroup
from verl.workers.config import CheckpointEngineConfig
from verl.workers.rollout.base import BaseRollout


def weights_of(step: int) -> dict[str, torch.Tensor]:
    """A model's, different in every step."""
    made = torch.Generator().manual_seed(step)
    return {
        "embed.weight": torch.randn(1000, 64, generator=made).to(torch.bfloat16),
        "layers.0.weight": torch.randn(64, 700, generator=made),
        "layers.0.bias": torch.randn(64, generator=made),
        "scale": torch.randn((), generator=made),
        "nothing": torch.empty(0, 4),
    }


class Actor(Worker):
    """Offers what verl's manager calls on the workers that train."""

    def __init__(self, config: CheckpointEngineConfig) -> None:
        super().__init__()
        options = dict(config.engine_kwargs.get(config.backend, {}))
        self.engine = CheckpointEngineRegistry.new(config.backend, 0, is_master=self.rank == 0, **options)
        self.weights = weights_of(0)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def train(self, step: int) -> None:
        self.weights = weights_of(step)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, blocking=False)
    async def update_weights(self, global_steps: int | None = None, mode: str = "auto") -> None:
        await self.engine.send_weights(iter(self.weights.items()), global_steps=global_steps)

    @register(dispatch_mode=Dispatch.DP_COMPUTE, blocking=False)
    def execute_checkpoint_engine(self, method: str, *args: Any, **kwargs: Any) -> Any:
        return getattr(self.engine, method)(*args, **kwargs)


class Served(BaseRollout):
    """Holds what it was given, as an engine does."""

    def __init__(self) -> None:
        self.weights: dict[str, torch.Tensor] = {}

    async def resume(self, tags: list[str]) -> None: ...

    async def release(self) -> None: ...

    async def update_weights(self, weights: Any, **kwargs: Any) -> None:
        self.weights = {name: tensor.clone() async for name, tensor in weights}


class RolloutWorker(CheckpointEngineWorker):
    def __init__(self, rollout_config: Any, model_config: Any) -> None:
        super().__init__(rollout_config, model_config, server_adapter=Served())

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def served(self) -> dict[str, torch.Tensor]:
        return self.server_adapter.weights


@CheckpointEngineRegistry.register("forgetful")
class Forgetful(backend.VerlSyncEngine):
    """Sends nothing, and says that it did: what a stale weight would be the sign of."""

    async def send_weights(self, weights: Any, global_steps: int | None = None) -> None:
        for _ in weights:
            pass


class Replica:
    """What verl's manager asks of a rollout replica, beside its workers."""

    def __init__(self, workers: list[Any]) -> None:
        self.workers = workers
        self.calls: list[str] = []

    def __getattr__(self, name: str) -> Any:
        async def note(*_: Any, **__: Any) -> None:
            self.calls.append(name)

        return note


def group(cls: type, size: int, *arguments: Any) -> RayWorkerGroup:
    import ray

    pool = RayResourcePool([size], use_gpu=False, max_colocate_count=1)
    made = RayClassWithInitArgs(ray.remote(cls), *arguments)
    return RayWorkerGroup(resource_pool=pool, ray_cls_with_init=made, device_name="cpu")
