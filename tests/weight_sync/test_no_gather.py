"""A sync asks nothing of the trainer's process group, and no memory for more than it copies at a time."""

from __future__ import annotations

import asyncio
import resource
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.weight_sync.trainers import CONFIG, NUM_RANKS, FSDP2Trainer
from tests.workers.engine.engine_cases import make_engine
from tests.workers.engine.rank_pool import RankPool
from verl.checkpoint_engine.manager import plan_of
from verl.checkpoint_engine.participants import Published, RolloutNode, TrainerRank
from verl.utils.builtin import make_tiny_model

ALLOWANCE = 4 * CONFIG.block_nbytes


async def test_a_sync_from_fsdp2_ranks_starts_no_collective_and_gathers_nothing(qwen3: FSDP2Trainer, tmp_path: Path):
    await qwen3.sync()
    qwen3.group.watch()
    qwen3.train()
    for collectives, _ in qwen3.group.watched():
        assert collectives > 0
    qwen3.group.watch()
    qwen3.group.export_hf(str(tmp_path), "float32")
    for _, gathers in qwen3.group.watched():
        assert gathers

    qwen3.group.watch()
    report = await qwen3.sync()
    assert qwen3.group.watched() == [(0, {})] * NUM_RANKS
    assert report.nbytes_moved == report.nbytes_needed > 0


@pytest.fixture
def rank_pool() -> Iterator[RankPool]:
    pool = RankPool(NUM_RANKS)
    yield pool
    pool.close()


def test_publishing_takes_no_memory_beside_the_slots_but_a_few_blocks(
    rank_pool: RankPool, tmp_path: Path, own_shm_dir: Path
):
    """The kernel refuses more. Measured on the host, where shared memory does not count; a device is not looked at."""
    path = make_tiny_model(tmp_path / "model", "qwen3", hidden_size=256, intermediate_size=2048, layers=4)
    for own_nbytes, refused in rank_pool.run(publish_under_a_limit, NUM_RANKS, path, own_shm_dir):
        assert own_nbytes > 5 * ALLOWANCE  # a copy of the rank's own shards would not have fitted, let alone the model
        assert refused


def publish_under_a_limit(path: Path, shm_dir: Path) -> tuple[int, bool]:
    """On every rank: bytes of its own shards at the rollout dtype, and whether the limit had any force."""
    return asyncio.run(_publish_under_a_limit(path, shm_dir))


async def _publish_under_a_limit(path: Path, shm_dir: Path) -> tuple[int, bool]:
    rank = dist.get_rank()
    trainer = TrainerRank(rank, make_engine(path).weight_source("bfloat16"), CONFIG)
    node = RolloutNode(0, CONFIG, job="test", shm_dir=shm_dir)
    plan = plan_of(everywhere(await trainer.describe()), block_nbytes=CONFIG.block_nbytes)
    await trainer.prepare(plan.encode())
    if rank == 0:
        await node.prepare(plan.encode())

    async def publish(version: int) -> Published:
        slots = everywhere({"node-0": await node.begin(version)} if rank == 0 else {})[0]
        own = await trainer.publish(version, slots)
        digests = [part.digests for part in everywhere(own)]
        if rank == 0:
            await node.verify(version, b"".join(digests))
            await node.commit(version, b"".join(digests))
        return own

    for version in (1, 2):  # maps the slots and starts the threads
        await publish(version)
    slots = everywhere({"node-0": await node.begin(3)} if rank == 0 else {})[0]
    limit = data_nbytes() + ALLOWANCE
    resource.setrlimit(resource.RLIMIT_DATA, (limit, resource.RLIM_INFINITY))
    try:
        own = await trainer.publish(3, slots)
        try:
            torch.empty(own.nbytes, dtype=torch.uint8)
            refused = False
        except RuntimeError:
            refused = True
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    digests = b"".join(part.digests for part in everywhere(own))
    if rank == 0:
        await node.verify(3, digests)
        await node.close()
    await trainer.close()
    return own.nbytes, refused


def everywhere(own: Any) -> list[Any]:
    """What every rank passes, by rank."""
    parts: list[Any] = [None] * NUM_RANKS
    dist.all_gather_object(parts, own)
    return parts


def data_nbytes() -> int:
    """Private writable memory of this process, which is what RLIMIT_DATA limits."""
    lines = Path("/proc/self/status").read_text().splitlines()
    (kibibytes,) = [line.split()[1] for line in lines if line.startswith("VmData:")]
    return int(kibibytes) * 1024
