"""The Ray actor that owns a rollout node's arena."""

from __future__ import annotations

from functools import cached_property, partial
from pathlib import Path
from typing import Any

import ray
from ray.actor import ActorHandle

from verl.checkpoint_engine.config import CheckpointEngineConfig
from verl.checkpoint_engine.participants import RolloutNode
from verl.checkpoint_engine.topology import Topology
from verl.checkpoint_engine.types import Member
from verl.utils.lifetime import begin_actor

NODE_CPUS = 0.05
"""Ray CPUs of a rollout node, which works only during a sync."""


class CheckpointEngineWorker:
    """One per rollout node, on that node. It stages, verifies and commits versions, and keeps the previous one.

    Called by the manager on the driver through `RayRolloutNode`. The arena goes when the actor does, however it ends.
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
        """Answers as long as the process lives."""

    async def check(self, arena_nbytes: int, arenas: int) -> None:
        await self._node.check(arena_nbytes, arenas)

    async def prepare(self, plan: bytes) -> Member:
        return await self._node.prepare(plan)

    async def connect(self, topology: Topology) -> None:
        await self._node.connect(topology)

    async def begin(self, version: int) -> str:
        return await self._node.begin(version)

    async def stage(self, version: int) -> int:
        return await self._node.stage(version)

    async def verify(self, version: int, digests: bytes) -> int:
        return await self._node.verify(version, digests)

    async def commit(self, version: int, digests: bytes) -> None:
        await self._node.commit(version, digests)

    async def drop(self) -> None:
        await self._node.drop()

    async def rollback(self, version: int) -> int | None:
        return await self._node.rollback(version)

    async def reverify(self, version: int) -> None:
        await self._node.reverify(version)

    async def close(self) -> None:
        await self._node.close()


def start_node(
    index: int, config: CheckpointEngineConfig, *, job: str, shm_dir: Path, options: dict[str, object]
) -> ActorHandle[Any]:
    """Start the worker of rollout node `index`; `options` (of `ray.remote`) say where."""
    actor: Any = ray.remote(CheckpointEngineWorker)
    handle: ActorHandle[Any] = actor.options(**{"num_cpus": NODE_CPUS, **options}).remote(
        index, config, job=job, shm_dir=str(shm_dir)
    )
    return handle
