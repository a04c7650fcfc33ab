"""Rollout nodes that join when a version is in service already."""

from __future__ import annotations

import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.checkpoint_engine.backends import CHAINS, using
from tests.checkpoint_engine.fakes import (
    ColumnShardedSource,
    Fleet,
    RecordingReplica,
    Through,
    arenas_in,
    assert_bit_equal,
)
from tests.checkpoint_engine.member_processes import MemberProcess, Node, ProcessFleet
from tests.checkpoint_engine.test_one_sided import engine_of, fleet_of
from verl.checkpoint_engine.config import CheckpointEngineConfig
from verl.checkpoint_engine.errors import ConfigError, IntegrityError, SyncAborted, TransportError, TransportTimeout
from verl.checkpoint_engine.memory.committed import committed_version
from verl.checkpoint_engine.sync.rollout_node import RolloutNode

LATE = [*CHAINS, using("kimi_ckpt_engine")]


@asynccontextmanager
async def newcomer(fleet: Fleet, shm_dir: Path, index: int) -> AsyncIterator[Through]:
    """A node of the fleet's job, of which the manager does not know."""
    node = Through(RolloutNode(index, fleet.config, job="test", shm_dir=shm_dir, host="a"))
    try:
        yield node
    finally:
        await node.member.close()


@pytest.mark.parametrize("backend", LATE)
async def test_a_node_that_joins_gets_the_version_in_service_while_nobody_else_does_anything(
    backend: str, tmp_path: Path
):
    tensors = {"w": torch.randn(700, 900), "norm": torch.randn(33)}
    async with (
        Fleet(
            tensors, tmp_path, backend=backend, retries=0, source=ColumnShardedSource, update_weights_bucket_megabytes=1
        ) as fleet,
        newcomer(fleet, tmp_path, 1) as node,
    ):
        await fleet.manager.update_weights(7)
        served = {name: tensor.clone() for name, tensor in tensors.items()}
        for tensor in tensors.values():
            tensor.add_(1)  # the trainer trains on
        others = [*fleet.trainers, *fleet.nodes]
        calls, log = [list(member.calls) for member in others], list(fleet.replicas[0].log)

        await fleet.manager.add_nodes([node])
        late = RecordingReplica("replica-late", 1)
        await fleet.manager.add_replicas([late])

        assert_bit_equal(late, 7, served)
        assert [member.calls for member in others] == calls
        assert fleet.replicas[0].log == log
        for version in (8, 9):
            await fleet.manager.update_weights(version)
            for replica in (*fleet.replicas, late):
                assert_bit_equal(replica, version, tensors)


async def test_in_a_chain_a_node_that_joins_reads_from_the_owners(tmp_path: Path):
    async with fleet_of(tmp_path, topology="chain", nodes=2) as fleet, newcomer(fleet, tmp_path, 2) as node:
        await fleet.manager.update_weights(1)
        await fleet.manager.add_nodes([node])
        assert committed_version(tmp_path / "verl-test-node-2") == 1
        await fleet.manager.update_weights(2)
        assert committed_version(tmp_path / "verl-test-node-2") == 2


async def test_a_node_takes_the_place_of_one_that_is_gone(tmp_path: Path):
    async with fleet_of(tmp_path, nodes=2, replicas=2) as fleet:
        await fleet.manager.update_weights(1)
        await fleet.nodes[1].member.close()
        async with newcomer(fleet, tmp_path, 1) as node:
            await fleet.manager.add_nodes([node])
            await fleet.manager.add_replicas([fleet.replicas[1]])
            assert fleet.replicas[1].log.count("activate") == 2
            await fleet.manager.update_weights(2)
            assert [replica.version for replica in fleet.replicas] == [2, 2]


async def test_a_node_may_join_before_the_first_sync(tmp_path: Path):
    async with fleet_of(tmp_path) as fleet, newcomer(fleet, tmp_path, 1) as node:
        await fleet.manager.add_nodes([node])
        await fleet.manager.update_weights(1)
        assert committed_version(tmp_path / "verl-test-node-1") == 1


@pytest.mark.parametrize("backend", ["naive", "gloo"])
async def test_a_backend_whose_nodes_cannot_fetch_by_themselves_refuses(backend: str, tmp_path: Path):
    async with (
        Fleet({"w": torch.randn(5, 4)}, tmp_path, backend=backend) as fleet,
        newcomer(fleet, tmp_path, 1) as node,
    ):
        await fleet.manager.update_weights(1)
        with pytest.raises(ConfigError, match=f"backend={backend}: a rollout node cannot join after the first sync"):
            await fleet.manager.add_nodes([node])
        assert node.calls == []
        assert len(arenas_in(tmp_path)) == 1
        await fleet.manager.update_weights(2)


async def refused(fleet: Fleet, node: Through, error: type[Exception]) -> Any:
    """The error of `add_nodes`, which must leave nothing half-loaded; the next sync goes without the node."""
    with pytest.raises(error) as raised:
        await fleet.manager.add_nodes([node])
    assert committed_version(node.member._open_arena.directory) is None
    assert node.calls[-1] == "drop"
    assert fleet.replicas[0].version == 1
    calls = list(node.calls)
    await fleet.manager.update_weights(9)
    assert fleet.replicas[0].version == 9
    assert node.calls == calls
    return raised.value


async def test_a_node_does_not_get_a_version_that_was_published_and_not_committed(tmp_path: Path):
    async with fleet_of(tmp_path) as fleet, newcomer(fleet, tmp_path, 1) as node:
        await fleet.manager.update_weights(1)

        def break_down() -> None:
            raise TransportError("no network")

        fleet.nodes[0].before["stage"] = break_down
        with pytest.raises(SyncAborted):
            await fleet.manager.update_weights(2)
        fleet.nodes[0].before.clear()
        error = await refused(fleet, node, TransportError)
        assert (error.version, error.phase, error.message) == (1, "stage", "it holds version 2")


async def test_a_region_that_is_written_while_a_node_joins_is_noticed(tmp_path: Path):
    async with fleet_of(tmp_path) as fleet, newcomer(fleet, tmp_path, 1) as node:
        await fleet.manager.update_weights(1)
        stamp = engine_of(fleet.trainers[1])._exposed.stamp
        node.before["stage"] = lambda: setattr(engine_of(node)._wires.first, "after_read", lambda *_: stamp.begin())
        error = await refused(fleet, node, TransportError)
        assert (error.version, error.member, error.message) == (1, "trainer-1", "it is publishing")


async def test_memory_that_is_overwritten_behind_the_stamps_fails_the_digests(tmp_path: Path):
    async with fleet_of(tmp_path) as fleet, newcomer(fleet, tmp_path, 1) as node:
        await fleet.manager.update_weights(1)
        engine_of(fleet.trainers[1])._exposed.region.bytes[1000] ^= 1
        error = await refused(fleet, node, IntegrityError)
        assert (error.version, error.phase) == (1, "verify")
        assert "from trainer-1" in str(error)


async def test_a_node_whose_owner_is_gone_is_refused_and_names_it(tmp_path: Path):
    async with fleet_of(tmp_path) as fleet, newcomer(fleet, tmp_path, 1) as node:
        await fleet.manager.update_weights(1)
        words = engine_of(fleet.trainers[0])._exposed.stamp._words

        def answer_as(incarnation: int) -> None:
            words[0] = incarnation

        node.before["stage"] = lambda before=int(words[0]): answer_as(before + 1)
        node.before["drop"] = lambda before=int(words[0]): answer_as(before)
        error = await refused(fleet, node, TransportError)
        assert (error.member, error.message) == ("trainer-0", "another process answers at its address")


@pytest.mark.parametrize("backend", [using("kimi_ckpt_engine")])
async def test_an_owner_that_dies_while_a_node_joins_is_named_and_the_node_may_try_again(backend: str, tmp_path: Path):
    config = CheckpointEngineConfig.from_mapping(
        {"backend": backend, "update_weights_bucket_megabytes": 1, "deadlines": {"stage_s": 30.0}}
    )
    async with ProcessFleet(config, tmp_path) as fleet:
        await fleet.sync(1)
        late = MemberProcess("node-1", Node, 1, config, tmp_path)
        try:
            await late.in_stage(1, signal.SIGKILL, fleet["trainer-1"].member.pid)
            with pytest.raises(TransportError) as raised:
                await fleet.manager.add_nodes([late])
            assert not isinstance(raised.value, TransportTimeout)  # noticed, not waited for
            assert (raised.value.version, raised.value.phase, raised.value.member) == (1, "stage", "trainer-1")
            assert committed_version(tmp_path / "verl-test-node-1") is None
            fleet.assert_serves(1, arena=False)

            await fleet.replace("trainer-1")
            await fleet.sync(2)
            await fleet.manager.add_nodes([late])
            assert committed_version(tmp_path / "verl-test-node-1") == 2
            await fleet.sync(3)
            assert committed_version(tmp_path / "verl-test-node-1") == 3
            fleet.assert_serves(3, arena=False)
        finally:
            await late.end()
