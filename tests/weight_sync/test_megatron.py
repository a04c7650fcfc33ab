"""A Megatron trainer in two stages, in front of an engine that has another trainer at other times."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.weight_sync.conftest import CASES, Line
from tests.weight_sync.test_bit_equality import NUM_VERSIONS, assert_served
from tests.weight_sync.trainers import NUM_RANKS, FSDPTrainer

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(400)]

NAME = "qwen3"


@pytest.fixture(scope="module")
def megatron(
    ray_cluster: None, model_paths: dict[str, Path], shm_dir: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[FSDPTrainer]:
    trainer = FSDPTrainer(
        model_paths[NAME],
        "megatron",
        CASES[NAME].dtype,
        shm_dir / "megatron",
        tmp_path_factory.mktemp("megatron"),
        megatron={"pipeline_model_parallel_size": NUM_RANKS, "dtype": "float32"},
    )
    trainer.version = 100  # the engine has had other versions
    yield trainer
    asyncio.run(trainer.close())


async def test_a_sync_starts_no_collective_and_gathers_nothing(megatron: FSDPTrainer):
    await megatron.sync()
    megatron.group.watch()
    megatron.train()
    for collectives, _ in megatron.group.watched():
        assert collectives > 0
    megatron.group.watch()
    report = await megatron.sync()
    assert megatron.group.watched() == [(0, {})] * NUM_RANKS
    assert report.nbytes_moved == report.nbytes_needed > 0


async def test_vllm_computes_with_the_cast_weights_of_both_stages(lines: dict[str, Line], megatron: FSDPTrainer):
    line = lines[NAME]
    await line.trainer.manager.remove_replicas([line.replica])
    await megatron.manager.add_replicas([line.replica])
    try:
        for _ in range(NUM_VERSIONS):
            report = await megatron.train_and_sync()
            assert report.replicas_updated == (line.replica.name,)
            assert_served(line, report.version, megatron.weights(), CASES[NAME].ranks)
    finally:
        await megatron.manager.remove_replicas([line.replica])
        await line.trainer.manager.add_replicas([line.replica])
