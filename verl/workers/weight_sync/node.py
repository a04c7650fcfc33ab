"""The Ray actor that owns a rollout node's arena."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import ray
from ray.actor import ActorHandle

from verl.checkpoint_engine.config import CheckpointEngineConfig
from verl.checkpoint_engine.sync.members import NodePort, methods_of
from verl.checkpoint_engine.sync.rollout_node import RolloutNode
from verl.utils.lifetime import begin_actor

NODE_CPUS = 0.05
"""Ray CPUs of a rollout node, which works only during a sync."""


class CheckpointEngineWorker:
    """The actor of one rollout node, a `NodePort`: it stages, verifies and commits versions.

    The manager on the driver calls it through `RayRolloutNode`. It keeps the previous version.
    Its arena is removed when the actor ends, even if killed.
    """

    def __init__(self, index: int, config: CheckpointEngineConfig, *, job: str, shm_dir: str) -> None:
        import torch  # noqa: F401 - for seconds: now, while trainer ranks build their model, and not in the first sync

        begin_actor()
        self._make = partial(RolloutNode, index, config, job=job, shm_dir=Path(shm_dir))

    @cached_property
    def _node(self) -> RolloutNode:
        """Made on first use: what is raised in an actor's constructor reaches callers as the actor's death."""
        return self._make()

    async def ping(self) -> None:
        """Return while the process lives."""


def _delegating(method: str) -> Callable[..., Awaitable[Any]]:
    async def call(self: CheckpointEngineWorker, *arguments: Any) -> Any:
        return await getattr(self._node, method)(*arguments)

    return call


for name in methods_of(NodePort) - vars(CheckpointEngineWorker).keys():
    setattr(CheckpointEngineWorker, name, _delegating(name))


def start_node(
    index: int, config: CheckpointEngineConfig, *, job: str, shm_dir: Path, options: dict[str, object]
) -> ActorHandle[Any]:
    """Start the worker of rollout node `index`. `options`: those of `ray.remote`, with its placement."""
    actor: Any = ray.remote(CheckpointEngineWorker)
    handle: ActorHandle[Any] = actor.options(**{"num_cpus": NODE_CPUS, **options}).remote(
        index, config, job=job, shm_dir=str(shm_dir)
    )
    return handle
