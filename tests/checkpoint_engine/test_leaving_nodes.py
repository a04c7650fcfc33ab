"""Rollout nodes that leave: the others go on without them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.checkpoint_engine.backends import BACKENDS, CHAINS
from tests.checkpoint_engine.fakes import Fleet, assert_bit_equal
from verl.checkpoint_engine.errors import SyncAborted, TransportError

IN_A_CHAIN = [
    pytest.param(*param.values, "chain", id=f"{param.values[0]}-chain", marks=param.marks) for param in CHAINS
]
ANYHOW = [pytest.param(*param.values, "auto", id=param.values[0], marks=param.marks) for param in BACKENDS]


@pytest.mark.parametrize(("backend", "topology"), ANYHOW + IN_A_CHAIN)
async def test_after_a_node_has_left_the_others_get_every_version(backend: str, topology: str, tmp_path: Path):
    tensors = {"w": torch.randn(700, 900), "norm": torch.randn(33)}
    async with Fleet(tensors, tmp_path, backend=backend, topology=topology, nodes=3, replicas=3, retries=0) as fleet:
        await fleet.manager.update_weights(1)
        gone = fleet.nodes[0]
        for call in ("prepare", "connect", "begin", "stage", "verify", "commit", "drop", "close"):
            gone.before[call] = is_gone
        with pytest.raises(SyncAborted):
            await fleet.manager.update_weights(2)

        await fleet.manager.remove_replicas([fleet.replicas[0]])
        await fleet.manager.remove_nodes([gone])
        calls = list(gone.calls)
        for version in (3, 4):
            for tensor in tensors.values():
                tensor.add_(1)
            await fleet.manager.update_weights(version)
            for replica in fleet.replicas[1:]:
                assert_bit_equal(replica, version, tensors)
        assert gone.calls == calls
        assert fleet.replicas[0].version == 1
        await gone.member.close()


def is_gone() -> Any:
    raise TransportError("its host is gone")
