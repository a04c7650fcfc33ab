"""The miniature sync over a cluster: a trainer rank and a rollout node on every host, as actors like in a job."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from functools import partial
from typing import Any

import ray

from verl.checkpoint_engine.config import CheckpointEngineConfig
from verl.checkpoint_engine.ports import WeightSource
from verl.checkpoint_engine.support import envs
from verl.doctor.finding import Finding
from verl.doctor.miniature import RowsOfOnes, synced
from verl.workers.weight_sync.node import start_node
from verl.workers.weight_sync.publisher import WeightPublisher
from verl.workers.weight_sync.ray_ports import RayRolloutNode, RayTrainerRank


class MiniatureRank(WeightPublisher):
    """A trainer rank without a trainer."""

    def __init__(self, rank: int, world_size: int) -> None:
        self._rank, self._source = rank, RowsOfOnes(rank, world_size)

    @property
    def rank(self) -> int:
        return self._rank

    def weight_source(self) -> WeightSource:
        return self._source

    async def step(self) -> None:
        self._source.step()


def miniature_over(config: CheckpointEngineConfig, hosts: Sequence[dict[str, Any]]) -> Finding:
    """Run the sync over a cluster. `hosts` has the options of `ray.remote` that place an actor on each host."""
    actor: Any = ray.remote(MiniatureRank)
    handles = [actor.options(num_cpus=0, **options).remote(rank, len(hosts)) for rank, options in enumerate(hosts)]
    ranks = [
        RayTrainerRank(rank, handle, config)  # type: ignore[abstract] # see `remote`
        for rank, handle in enumerate(handles)
    ]
    start = partial(start_node, config=config, job="doctor", shm_dir=envs.shm_dir())
    nodes = [
        RayRolloutNode(index, partial(start, index, options=options | {"num_cpus": 0}))  # type: ignore[abstract]
        for index, options in enumerate(hosts)
    ]
    try:
        return asyncio.run(synced(config, ranks, nodes, "the cluster", partial(_step, handles)))
    finally:
        for handle in handles:
            ray.kill(handle)
        for node in nodes:
            node.kill()


def _step(handles: Sequence[Any]) -> None:
    ray.get([handle.step.remote() for handle in handles])
