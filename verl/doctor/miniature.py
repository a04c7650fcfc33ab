"""A miniature sync through the job's own backend: all kinds of members, with a few MiB of weights.

On one host the members live in this process; over a cluster see `miniature_ranks.py`.
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Sequence
from statistics import median

import torch

from verl.checkpoint_engine.config import CheckpointEngineConfig
from verl.checkpoint_engine.errors import CheckpointEngineError
from verl.checkpoint_engine.plan.types import Box, Shard, SyncReport, TensorSpec
from verl.checkpoint_engine.support import envs
from verl.checkpoint_engine.sync.manager import CheckpointEngineManager
from verl.checkpoint_engine.sync.members import NodePort, TrainerPort
from verl.checkpoint_engine.sync.rollout_node import RolloutNode
from verl.checkpoint_engine.sync.trainer_rank import TrainerRank
from verl.doctor.finding import Finding

MIB = 32
VERSIONS = 4
COLUMNS = 1024


class RowsOfOnes:
    """A weight source with some rows of one bfloat16 matrix."""

    def __init__(self, rank: int, world_size: int) -> None:
        rows = MIB * 2**20 // (2 * COLUMNS)
        self._spec = TensorSpec(name="weight", shape=(rows, COLUMNS), dtype="bfloat16")
        self._box = Box((rows * rank // world_size, 0), (rows * (rank + 1) // world_size, COLUMNS))
        self._values = torch.ones(self._box.shape, dtype=torch.bfloat16)

    def specs(self) -> Sequence[TensorSpec]:
        return [self._spec]

    def shards(self) -> Sequence[Shard]:
        return [Shard("weight", self._box)]

    def copy(self, shard: Shard, destination: torch.Tensor) -> None:
        first, last = (edge - self._box.start[0] for edge in (shard.box.start[0], shard.box.stop[0]))
        destination.copy_(self._values[first:last])

    def step(self) -> None:
        self._values.neg_()


async def miniature_here(config: CheckpointEngineConfig) -> Finding:
    """Run the sync with two trainer ranks and a rollout node in this process."""
    sources = [RowsOfOnes(rank, 2) for rank in range(2)]
    ranks = [TrainerRank(rank, source, config) for rank, source in enumerate(sources)]
    node = RolloutNode(0, config, job=f"doctor-{id(sources):x}", shm_dir=envs.shm_dir())

    def step() -> None:
        for source in sources:
            source.step()

    return await synced(config, ranks, [node], socket.gethostname(), step)


async def synced(
    config: CheckpointEngineConfig,
    ranks: Sequence[TrainerPort],
    nodes: Sequence[NodePort],
    where: str,
    step: Callable[[], object],
) -> Finding:
    """Sync several versions; `step` changes the weights before each."""
    check = "miniature sync"
    try:
        manager = CheckpointEngineManager(config=config, trainers=ranks, nodes=nodes)
        try:
            reports: list[SyncReport] = []
            for version in range(VERSIONS):
                step()
                reports.append(await manager.update_weights(version))
        finally:
            await manager.close()
    except CheckpointEngineError as exc:
        return Finding(
            check=check,
            where=where,
            state="wrong",
            found=f"{config.backend}: {exc}",
            remedy="what it says; docs/troubleshooting.md has the common causes",
        )
    seconds = median(report.total_s for report in reports[1:])
    return Finding(
        check=check,
        where=where,
        state="ok",
        found=f"{config.backend}: {MIB} MiB from {len(ranks)} ranks to {len(nodes)} nodes in {seconds:.3f} s, verified",
        value=seconds,
    )
