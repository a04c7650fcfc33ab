"""`nccl` and `hccl`: the same contract, between devices. It takes two, because a device is in a group once."""

from __future__ import annotations

from pathlib import Path

import pytest
import ray
import torch

from tests.checkpoint_engine.fakes import arenas_in
from tests.checkpoint_engine.test_processes import Processes
from verl.checkpoint_engine.config import CheckpointEngineConfig
from verl.workers.weight_sync.node import start_node


def devices(kind: str) -> int:
    module = getattr(torch, kind, None)
    return module.device_count() if module is not None else 0


class DeviceProcesses(Processes):
    """Every member has a device of its own: three in all."""

    resources: dict[str, object] = {}

    def start_trainer(self, rank: int):
        return super().start_trainer(rank, **self.resources)

    def start_node(self):
        return start_node(0, self.config, job="test", shm_dir=self.shm_dir, options=dict(self.resources))


@pytest.mark.parametrize(
    ("backend", "kind", "resources"),
    [
        pytest.param("nccl", "cuda", {"num_gpus": 1}, marks=pytest.mark.gpu),
        pytest.param("hccl", "npu", {"resources": {"NPU": 1}}, marks=pytest.mark.npu),
    ],
)
@pytest.mark.parametrize("rows", [64, 2**20], ids=["less than a bucket", "128 buckets"])
async def test_three_versions_arrive_bit_equal(backend, kind, resources, rows, tmp_path: Path, ray_cluster):
    if devices(kind) < 3:
        pytest.skip(f"{backend} needs three {kind} devices for two senders and a node; there are {devices(kind)}")
    if ray.cluster_resources().get("GPU" if kind == "cuda" else "NPU", 0) < 3:
        pytest.skip("Ray does not see the devices")
    config = CheckpointEngineConfig.from_mapping(
        {"backend": backend, "retries": 0, "engine_kwargs": {backend: {"bucket_megabytes": 1}}}
    )
    DeviceProcesses.resources = resources
    async with DeviceProcesses(tmp_path, config, rows) as processes:
        for version in range(3):
            await processes.sync(version)
            processes.assert_serves(version)
    assert not arenas_in(tmp_path)
