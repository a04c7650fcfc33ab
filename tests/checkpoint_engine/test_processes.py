"""Members in processes of their own, killed at the worst moment."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import ray
import torch

from tests.checkpoint_engine.fakes import RecordingReplica, RowShardedSource, arenas_in, soon, spare_slot
from verl.checkpoint_engine.config import CheckpointEngineConfig
from verl.checkpoint_engine.errors import IntegrityError, SyncAborted, TransportError, TransportTimeout
from verl.checkpoint_engine.sync.manager import CheckpointEngineManager
from verl.checkpoint_engine.sync.trainer_rank import TrainerRank
from verl.workers.weight_sync.node import start_node
from verl.workers.weight_sync.ray_ports import RayRolloutNode, RayTrainerRank

CONFIG = CheckpointEngineConfig.from_mapping({"deadlines": {"publish_s": 300, "verify_s": 300}})
QUICK_S = 120.0
"""Far below every deadline: a death is noticed, not waited for."""


def weights(version: int, rows: int = 64) -> dict[str, torch.Tensor]:
    return {"w": torch.full((rows, 32), float(version))}


class SlowSource(RowShardedSource):
    """Touches `marker` when it is asked to copy, and then takes its time."""

    marker: Path | None = None

    def copy(self, shard: Any, destination: torch.Tensor) -> None:
        if self.marker is not None:
            self.marker.touch()
            time.sleep(60)
        super().copy(shard, destination)


class Trainer:
    """A trainer rank as a Ray actor."""

    def __init__(self, rank: int, world_size: int, config: CheckpointEngineConfig, rows: int) -> None:
        self.rows = rows
        self.source = SlowSource(weights(0, rows), rank, world_size)
        self.rank = TrainerRank(rank, self.source, config)

    async def set_weights(self, version: int, marker: Path | None = None) -> int:
        self.source.tensors, self.source.marker = weights(version, self.rows), marker
        return os.getpid()

    async def describe_weights(self, config: CheckpointEngineConfig) -> Any:
        return await self.rank.describe()

    async def prepare_weight_sync(self, plan: bytes) -> str:
        return await self.rank.prepare(plan)

    async def connect_weight_sync(self, topology: Any) -> None:
        await self.rank.connect(topology)

    async def sync_rollout_weights_by_checkpoint(self, version: int, slots: dict[str, str], waits: bool) -> Any:
        return await self.rank.publish(version, slots, waits)

    async def published_weight_sync(self, version: int) -> Any:
        return await self.rank.published(version)

    async def serve_weight_sync(self, version: int) -> int:
        return await self.rank.serve(version)

    async def close_weight_sync(self) -> None:
        await self.rank.close()


class Processes:
    """Two trainer ranks and a rollout node, each in its own process; the replica and the manager are here."""

    def __init__(self, shm_dir: Path, config: CheckpointEngineConfig = CONFIG, rows: int = 64) -> None:
        self.config, self.rows, self.shm_dir = config, rows, shm_dir
        self.trainers = [self.start_trainer(rank) for rank in range(2)]
        self.node = self.start_node()
        self.replica = RecordingReplica()
        trainers = [RayTrainerRank(rank, handle, config) for rank, handle in enumerate(self.trainers)]
        nodes = [RayRolloutNode(0, lambda: self.node)]
        self.manager = CheckpointEngineManager(config=config, trainers=trainers, nodes=nodes)

    def start_trainer(self, rank: int, **options: object) -> Any:
        return ray.remote(Trainer).options(num_cpus=0.05, **options).remote(rank, 2, self.config, self.rows)

    def start_node(self) -> Any:
        return start_node(0, self.config, job="test", shm_dir=self.shm_dir, options={})

    async def __aenter__(self) -> Processes:
        await self.manager.add_replicas([self.replica])
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.manager.close()
        for handle in (*self.trainers, self.node):
            ray.kill(handle)

    async def set_weights(self, version: int, slow: int | None = None, marker: Path | None = None) -> list[int]:
        """Give every rank the weights of `version`; process ids. Rank `slow` will touch `marker` and hang."""
        calls = [
            handle.set_weights.remote(version, marker if rank == slow else None)
            for rank, handle in enumerate(self.trainers)
        ]
        return list(await asyncio.gather(*calls))

    async def sync(self, version: int) -> None:
        await self.set_weights(version)
        await self.manager.update_weights(version)

    def assert_serves(self, version: int) -> None:
        assert self.replica.version == version
        assert not self.replica.paused
        assert torch.equal(self.replica.weights["w"], weights(version, self.rows)["w"])


async def until(condition: Callable[[], bool]) -> None:
    assert await asyncio.to_thread(soon, condition)


@pytest.mark.usefixtures("ray_cluster")
class TestProcesses:
    async def test_a_trainer_rank_that_is_killed_while_it_publishes_aborts_the_sync_at_once(self, tmp_path: Path):
        async with Processes(tmp_path) as processes:
            await processes.sync(1)
            marker = tmp_path / "publishing"
            pids = await processes.set_weights(2, slow=1, marker=marker)
            syncing = asyncio.ensure_future(processes.manager.update_weights(2))
            await until(marker.exists)
            os.kill(pids[1], signal.SIGKILL)
            with pytest.raises(SyncAborted) as raised:
                await syncing
            assert isinstance(raised.value.__cause__, TransportError)
            assert not isinstance(raised.value.__cause__, TransportTimeout)  # noticed, not waited for
            assert (raised.value.phase, raised.value.member) == ("publish", "trainer-1")
            assert "its process is gone" in str(raised.value)
            processes.assert_serves(1)
            assert arenas_in(tmp_path)
        assert not arenas_in(tmp_path)

    async def test_a_node_that_is_killed_takes_its_arena_along_and_the_replica_keeps_serving(self, tmp_path: Path):
        async with Processes(tmp_path) as processes:
            await processes.sync(1)
            marker = tmp_path / "publishing"
            await processes.set_weights(2, slow=0, marker=marker)
            syncing = asyncio.ensure_future(processes.manager.update_weights(2))
            await until(marker.exists)
            ray.kill(processes.node)
            await until(lambda: not arenas_in(tmp_path))
            for handle in processes.trainers:
                ray.kill(handle)
            with pytest.raises(SyncAborted):
                await asyncio.wait_for(syncing, QUICK_S)
            processes.assert_serves(1)

    async def test_errors_arrive_whole_from_another_process_and_the_next_sync_works(self, tmp_path: Path):
        async with Processes(tmp_path) as processes:
            await processes.sync(1)
            verify = processes.manager._membership.nodes[0].verify

            async def flip_and_verify(version: int, digests: bytes) -> None:
                with spare_slot(tmp_path).open("r+b") as file:
                    file.write(b"\x01")
                await verify(version, digests)

            processes.manager._membership.nodes[0].verify = flip_and_verify
            with pytest.raises(SyncAborted) as raised:
                await processes.sync(2)
            cause = raised.value.__cause__
            assert isinstance(cause, IntegrityError)
            assert (cause.version, cause.phase, cause.member) == (2, "verify", "node-0")
            assert "w[0:32, 0:32] (bytes 0..4096, from trainer-0)" in str(cause)
            processes.assert_serves(1)
            processes.manager._membership.nodes[0].verify = verify
            await processes.sync(3)
            processes.assert_serves(3)
