"""A chain of rollout nodes: everybody ends up with the owners' bytes, although only the first node reads them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.checkpoint_engine.backends import CHAINS
from tests.checkpoint_engine.fakes import ColumnShardedSource, Fleet, RowShardedSource
from tests.checkpoint_engine.test_contract import CASES, assert_bit_equal, tensors_of


def chain_of(tensors: dict[str, torch.Tensor], tmp_path: Path, **options: Any) -> Fleet:
    options = {"update_weights_bucket_megabytes": 1, "block_kilobytes": 4, "retries": 0, **options}
    return Fleet(tensors, tmp_path, topology="chain", replicas=options["nodes"], **options)


@pytest.mark.parametrize("backend", CHAINS)
@pytest.mark.parametrize("nodes", [1, 2, 3])
@pytest.mark.parametrize("source", [RowShardedSource, ColumnShardedSource])
async def test_three_versions_of_every_kind_of_tensor_arrive_bit_equal_on_every_node(
    backend: str, nodes: int, source: type[RowShardedSource], tmp_path: Path
):
    """All kinds of the contract suite in one model; what is one model there is one tensor name's prefix here."""

    def tensors(version: int) -> dict[str, torch.Tensor]:
        return {f"{case}.{name}": value for case in CASES for name, value in tensors_of(case, version).items()}

    async with chain_of(tensors(0), tmp_path, trainers=3, nodes=nodes, backend=backend, source=source) as fleet:
        for version in range(3):
            expected = tensors(version)
            fleet.set_weights(expected)
            report = await fleet.manager.update_weights(version)
            for replica in fleet.replicas:
                assert_bit_equal(replica, version, expected)
            payload = sum(tensor.nbytes for tensor in expected.values())
            assert report.nbytes_moved == payload * (nodes + 1)


@pytest.mark.parametrize("backend", CHAINS)
async def test_an_empty_model_passes_a_chain(backend: str, tmp_path: Path):
    async with chain_of({}, tmp_path, nodes=2, backend=backend) as fleet:
        for version in range(2):
            await fleet.manager.update_weights(version)
        assert fleet.replicas[1].version == 1
