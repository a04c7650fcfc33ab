"""A chain of rollout nodes: everybody ends up with the owners' bytes, although only the first node reads them."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.fleet import node_process
from tests.checkpoint_engine.backends import CHAINS
from tests.checkpoint_engine.fakes import (
    ColumnShardedSource,
    Fleet,
    RecordingReplica,
    RowShardedSource,
    assert_bit_equal,
    soon,
)
from tests.checkpoint_engine.test_contract import CASES, tensors_of
from tests.checkpoint_engine.test_one_sided import engine_of
from verl.checkpoint_engine.backends import one_sided
from verl.checkpoint_engine.config import CheckpointEngineConfig
from verl.checkpoint_engine.errors import ConfigError, SyncAborted, TransportError, TransportTimeout
from verl.checkpoint_engine.links.cuts import part_nbytes_for
from verl.checkpoint_engine.registry import resolve_backend
from verl.checkpoint_engine.sync.manager import CheckpointEngineManager

QUICK_S = 60.0
"""Far below every deadline."""
LARGE = {"one row larger than two blocks", "larger than two buckets", "one row larger than two buckets"}
MANY = {"1,000 tiny tensors"}
ALL = {"all of these in one"}


def every_kind(version: int) -> dict[str, torch.Tensor]:
    """The models of the contract suite, in one, but for those that are only large or many."""
    cases = CASES.keys() - LARGE - MANY - ALL
    return {f"{case}.{name}": value for case in sorted(cases) for name, value in tensors_of(case, version).items()}


def chain_of(tensors: dict[str, torch.Tensor], tmp_path: Path, *, nodes: int, **options: Any) -> Fleet:
    options = {"topology": "chain", "update_weights_bucket_megabytes": 1, "block_kilobytes": 4, "retries": 0, **options}
    return Fleet(tensors, tmp_path, nodes=nodes, replicas=nodes, **options)


@pytest.mark.parametrize("backend", CHAINS)
@pytest.mark.parametrize(("nodes", "source"), [(1, RowShardedSource), (2, ColumnShardedSource), (3, RowShardedSource)])
async def test_three_versions_of_every_kind_of_tensor_arrive_bit_equal_on_every_node(
    backend: str, nodes: int, source: type[RowShardedSource], tmp_path: Path
):
    async with chain_of(every_kind(0), tmp_path, trainers=2, nodes=nodes, backend=backend, source=source) as fleet:
        async for expected, report in fleet.three_versions(every_kind):
            payload = sum(tensor.nbytes for tensor in expected.values())
            assert report.nbytes_moved == payload * (nodes + 1)


@pytest.mark.parametrize("backend", CHAINS)
async def test_an_empty_model_passes_a_chain(backend: str, tmp_path: Path):
    async with chain_of({}, tmp_path, nodes=2, backend=backend) as fleet:
        for version in range(2):
            await fleet.manager.update_weights(version)
        assert fleet.replicas[1].version == 1


async def test_only_the_first_node_reads_the_bytes_of_owners(tmp_path: Path):
    tensors = {"w": torch.randn(700, 900), "norm": torch.randn(33)}
    async with chain_of(tensors, tmp_path, nodes=3, backend="memory-wire") as fleet:
        await fleet.manager.update_weights(1)
        regions = [engine_of(trainer)._exposed.region for trainer in fleet.trainers]
        from_owners = [0, 0, 0]
        for index, node in enumerate(fleet.nodes):

            def count(source: int, nbytes: int, index: int = index) -> None:
                if any(region.address <= source < region.address + region.nbytes for region in regions):
                    from_owners[index] += nbytes

            engine_of(node)._wires.first.before_read = count
        await fleet.manager.update_weights(2)
    assert from_owners[0] >= sum(tensor.nbytes for tensor in tensors.values())
    assert from_owners[1:] == [0, 0]


async def test_a_node_passes_on_what_it_has_while_the_rest_is_still_to_come(tmp_path: Path):
    """Every part of a slot has short pieces, which lie at the end of their owners' regions."""
    layers = {f"{index}.{name}": size for index in range(16) for name, size in (("w", 2**19), ("norm", 33))}
    tensors = {name: torch.randn(size).view(-1, 1) for name, size in layers.items()}
    payload = sum(tensor.nbytes for tensor in tensors.values())
    async with chain_of(tensors, tmp_path, nodes=2, backend="memory-wire") as fleet:
        await fleet.manager.update_weights(1)
        first, second = (engine_of(node) for node in fleet.nodes)
        arrived = {"node-0": 0, "node-1": 0}
        passed_on, waited_for = threading.Event(), []

        def at_first(target: int, nbytes: int) -> None:
            arrived["node-0"] += nbytes
            if arrived["node-0"] > payload * 3 // 4 and not waited_for:
                waited_for.append(passed_on.wait(QUICK_S))

        def at_second(target: int, nbytes: int) -> None:
            if any(
                start <= target < start + len(slot)
                for slot in second._wires.slots.values()
                for start in [slot.ctypes.data]
            ):
                arrived["node-1"] += nbytes
            if arrived["node-1"] > payload // 2:
                passed_on.set()

        first._wires.first.after_read, second._wires.first.after_read = at_first, at_second
        await fleet.manager.update_weights(2)
    assert waited_for == [True]


@pytest.mark.parametrize(
    ("slot_nbytes", "most_nbytes", "part_nbytes"),
    [(0, 2**26, 2**20), (2**28, 2**26, 2**20), (2**30, 2**26, 2**22), (2**30, 2**21, 2**21), (2**40, 2**26, 2**26)],
)
def test_a_slot_is_cut_into_a_few_hundred_parts_of_at_most_a_bucket(
    slot_nbytes: int, most_nbytes: int, part_nbytes: int
):
    assert part_nbytes_for(slot_nbytes, most_nbytes) == part_nbytes


@pytest.mark.parametrize("backend", CHAINS)
async def test_a_version_that_is_tried_again_is_not_taken_from_the_first_attempt(backend: str, tmp_path: Path):
    """Node 0 still shows the first attempt, damaged, while node 1 begins the second."""
    tensors = {"w": torch.randn(700, 900)}
    async with chain_of(tensors, tmp_path, nodes=2, backend=backend, retries=1) as fleet:

        def damage_everything_once() -> None:
            fleet.nodes[0].after.pop("stage")
            fleet.nodes[0].member._open_arena.writable_view().bytes[:] ^= 1

        fleet.nodes[0].after["stage"] = damage_everything_once
        report = await fleet.manager.update_weights(1)
        assert report.retries == 1
        for replica in fleet.replicas:
            assert_bit_equal(replica, 1, tensors)


@pytest.mark.usefixtures("forkserver")
@pytest.mark.parametrize("backend", CHAINS)
async def test_a_node_that_is_killed_in_the_middle_of_a_chain_is_named_and_can_be_replaced(
    backend: str, tmp_path: Path
):
    tensors = {f"w{index}": torch.randn(1024, 1024) for index in range(4)}
    async with chain_of(tensors, tmp_path, nodes=3, backend=backend) as fleet:
        middle = node_process(1, fleet.config, job="test", shm_dir=tmp_path)
        manager = CheckpointEngineManager(
            config=fleet.config, trainers=fleet.trainers, nodes=[fleet.nodes[0], middle, fleet.nodes[2]]
        )
        replicas = [RecordingReplica(f"replica-{index}", index) for index in range(3)]
        try:
            await manager.add_replicas(replicas)
            await manager.update_weights(1)
            before = {name: tensor.clone() for name, tensor in tensors.items()}
            fleet.nodes[0].before["stage"] = lambda: os.kill(middle.pid, signal.SIGKILL)
            with pytest.raises(SyncAborted) as raised:
                await manager.update_weights(2)
            assert isinstance(raised.value.__cause__, TransportError)
            assert not isinstance(raised.value.__cause__, TransportTimeout)  # noticed, not waited for
            assert (raised.value.version, raised.value.phase, raised.value.member) == (2, "stage", "node-1")
            for replica in replicas:
                assert_bit_equal(replica, 1, before)
            fleet.nodes[0].before.clear()
            middle.replace()
            await manager.update_weights(3)
            for replica in replicas:
                assert_bit_equal(replica, 3, tensors)
        finally:
            await manager.close()
            middle.end()
    assert soon(lambda: not list(tmp_path.glob("verl-test-*")))


@pytest.mark.parametrize(
    ("backend", "topology", "possible"),
    [("naive", "chain", "auto, direct"), ("gloo", "chain", "auto, broadcast"), ("gloo", "direct", "auto, broadcast")],
)
def test_a_topology_that_a_backend_cannot_follow_is_refused(backend: str, topology: str, possible: str):
    config = CheckpointEngineConfig.from_mapping({"backend": backend, "topology": topology})
    with pytest.raises(
        ConfigError, match=f"topology={topology} is impossible .*backend={backend}; possible: {possible}$"
    ):
        resolve_backend(config)


def test_an_unknown_topology_is_refused_with_those_that_exist():
    with pytest.raises(ConfigError, match="chain"):
        CheckpointEngineConfig.from_mapping({"topology": "chian"})


@pytest.mark.parametrize("topology", ["chain", "tree", "p2p_broadcast"])
async def test_who_holds_everybody_up_is_named_also_by_nodes_that_do_not_read_from_it(
    topology: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(one_sided, "_before", lambda deadline_s: deadline_s / 4)
    tensors = {"w": torch.randn(2000, 900)}
    options = {"topology": topology, "backend": "memory-wire", "deadlines": {"stage_s": 20.0}}
    async with chain_of(tensors, tmp_path, nodes=4, **options) as fleet:
        await fleet.manager.update_weights(1)
        fleet.nodes[1].before["stage"] = lambda: asyncio.sleep(300)
        with pytest.raises(SyncAborted) as raised:
            await fleet.manager.update_weights(2)
        assert "bytes of node-1 not here within" in str(raised.value)
        fleet.nodes[1].before.clear()
        await fleet.manager.update_weights(3)
        for replica in fleet.replicas:
            assert_bit_equal(replica, 3, tensors)
