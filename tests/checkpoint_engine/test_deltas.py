"""Syncs that move what changed: bit-equal on every backend and along every topology, and verified as any other."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest
import torch

from tests.checkpoint_engine.backends import EXAMPLE, using
from tests.checkpoint_engine.fakes import ColumnShardedSource, Fleet, RowShardedSource
from tests.checkpoint_engine.test_contract import CASES, assert_bit_equal, tensors_of
from verl.checkpoint_engine.plan.types import SyncReport

QUICK = ("tcp", "nixl", EXAMPLE)
OPTIONS = {"delta": "always", "block_kilobytes": 4, "update_weights_bucket_megabytes": 1, "retries": 0}


def nudged(tensors: Mapping[str, torch.Tensor], fraction: float, seed: int) -> dict[str, torch.Tensor]:
    """`tensors` with about that fraction of the bit patterns one up or down."""
    generator = torch.Generator().manual_seed(seed)
    found = {}
    for name, tensor in tensors.items():
        changed = tensor.contiguous().clone()
        integer = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()]
        if tensor.dtype != torch.bool:
            bits = changed.reshape(-1).view(integer)
            where = torch.rand(bits.shape, generator=generator) < fraction
            bits += where * (2 * torch.randint(0, 2, bits.shape, generator=generator) - 1).to(integer)
        found[name] = changed
    return found


async def synced(fleet: Fleet, version: int, tensors: Mapping[str, torch.Tensor]) -> SyncReport:
    fleet.set_weights(tensors)
    report = await fleet.manager.update_weights(version)
    for replica in fleet.replicas:
        assert_bit_equal(replica, version, tensors)
    return report


@pytest.mark.parametrize("case", list(CASES))
async def test_every_kind_of_model_arrives_bit_equal(case: str, tmp_path: Path) -> None:
    async with Fleet(tensors_of(case, 0), tmp_path, trainers=3, replicas=2, backend="tcp", **OPTIONS) as fleet:
        tensors = tensors_of(case, 0)
        await synced(fleet, 0, tensors)
        for version in range(1, 4):
            tensors = nudged(tensors, 0.02, version)
            report = await synced(fleet, version, tensors)
            assert report.delta is not None
            assert report.delta.pieces_whole == 0
            assert report.delta.way == "delta"
        await synced(fleet, 4, tensors_of(case, 4))  # everything is another


@pytest.mark.parametrize("source", [RowShardedSource, ColumnShardedSource])
@pytest.mark.parametrize("backend", [using(backend) for backend in (*QUICK, "mooncake", "kimi_ckpt_engine")])
async def test_every_backend_moves_little_for_few_changes(
    backend: str, source: type[RowShardedSource], tmp_path: Path
) -> None:
    tensors = {"w": torch.randn(256, 1024).bfloat16(), "frozen": torch.randn(64, 512).bfloat16(), "n": torch.zeros(0)}
    options = OPTIONS | {"block_kilobytes": 64}
    async with Fleet(tensors, tmp_path, trainers=2, nodes=3, backend=backend, source=source, **options) as fleet:
        full = await synced(fleet, 0, tensors)
        for version in range(1, 4):
            tensors = nudged(tensors, 0.01, version) | {"frozen": tensors["frozen"]}
            report = await synced(fleet, version, tensors)
            assert report.delta is not None
            assert (report.delta.way, report.delta.pieces_whole) == ("delta", 0)
            assert report.delta.tensors_unchanged >= 1
            assert report.delta.most_changed[0][0] == "w"
            assert report.nbytes_moved < full.nbytes_moved / 2  # owners copy in full; nodes get a hundredth


@pytest.mark.parametrize("topology", ["direct", "chain", "tree", "p2p_broadcast"])
async def test_nodes_pass_deltas_on(topology: str, tmp_path: Path) -> None:
    tensors = tensors_of("large and small in turn", 0)
    async with Fleet(tensors, tmp_path, trainers=2, nodes=4, backend="tcp", topology=topology, **OPTIONS) as fleet:
        await synced(fleet, 0, tensors)
        for version in range(1, 4):
            tensors = nudged(tensors, 0.01, version)
            report = await synced(fleet, version, tensors)
            assert report.delta is not None
            assert (report.delta.way, report.delta.pieces_whole) == ("delta", 0)
