"""`kimi_ckpt_engine` among several nodes: who pulls, who passes on, and what is noticed when something goes wrong.

Most of it runs over a wire to memory of this process; the real one is in the contract and failure suites.
"""

from __future__ import annotations

import asyncio
import threading
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from tests.checkpoint_engine.fakes import ColumnShardedSource, Fleet, RowShardedSource, assert_bit_equal
from tests.checkpoint_engine.test_contract import BLOCK_KB, tensors_of
from tests.checkpoint_engine.test_one_sided import MemoryWire, engine_of

pytest.importorskip("mooncake", reason="mooncake is not installed", exc_type=ImportError)

from verl.checkpoint_engine.backends import kimi_ckpt_engine
from verl.checkpoint_engine.backends.kimi_ckpt_engine import KimiCkptEngine, _rdma_devices
from verl.checkpoint_engine.config import CheckpointEngineConfig, KimiCkptEngineOptions
from verl.checkpoint_engine.errors import ConfigError, SyncAborted, TransportError, TransportTimeout
from verl.checkpoint_engine.links.wire import OwnerAddress
from verl.checkpoint_engine.memory.host_memory import free_host_nbytes
from verl.checkpoint_engine.plan.topology import Topology, p2p_broadcast
from verl.checkpoint_engine.plan.types import Member
from verl.checkpoint_engine.registry import CheckpointEngineRegistry, resolve_backend
from verl.utils import config as strict


@CheckpointEngineRegistry.register("kimi-in-memory")
class InMemory(KimiCkptEngine):
    @classmethod
    def build_topology(cls, trainers: Any, nodes: Any) -> Topology:
        """Every rank has a network device of its own."""
        return p2p_broadcast(trainers, nodes)

    def open_wire(self, topology: Any) -> Any:
        wire = MemoryWire()
        wire.log = ["opened"]
        return wire


TENSORS = {"w": torch.randn(2000, 900), "norm": torch.randn(7), "columns": torch.randn(40, 30)}


def fleet_of(tensors: dict[str, torch.Tensor], tmp_path: Path, **options: Any) -> Fleet:
    """Over memory, in buckets of 1 MiB; `kimi` are the backend's options."""
    options = {
        "trainers": 2,
        "nodes": 3,
        "retries": 0,
        "update_weights_bucket_megabytes": 1,
        "engine_kwargs": {"kimi_ckpt_engine": options.pop("kimi", {})},
        **options,
    }
    return Fleet(tensors, tmp_path, backend="kimi-in-memory", replicas=options["nodes"], **options)


@pytest.mark.parametrize(
    ("trainers", "nodes", "source"), [(1, 3, RowShardedSource), (3, 2, ColumnShardedSource), (4, 4, RowShardedSource)]
)
async def test_three_versions_of_every_kind_of_tensor_arrive_bit_equal_on_every_node(
    trainers: int, nodes: int, source: type[RowShardedSource], tmp_path: Path
):
    """The models of the contract suite, in one."""
    case = "all of these in one"
    options = {"trainers": trainers, "nodes": nodes, "source": source, "block_kilobytes": BLOCK_KB}
    async with fleet_of(tensors_of(case, 0), tmp_path, **options) as fleet:
        async for expected, report in fleet.three_versions(partial(tensors_of, case)):
            assert report.nbytes_moved == (nodes + 1) * sum(tensor.nbytes for tensor in expected.values())


@pytest.mark.parametrize("case", ["empty model", "only zero-byte tensors", "scalar", "exactly a bucket"])
async def test_every_kind_of_model_arrives_bit_equal_on_two_nodes(case: str, tmp_path: Path):
    tensors = tensors_of(case, 0)
    async with fleet_of(tensors, tmp_path, nodes=2, block_kilobytes=BLOCK_KB) as fleet:
        for version in range(2):
            await fleet.manager.update_weights(version)
        for replica in fleet.replicas:
            assert_bit_equal(replica, 1, tensors)


async def test_every_byte_leaves_its_owner_once_and_the_receivers_share_the_work(tmp_path: Path):
    async with fleet_of(TENSORS, tmp_path, nodes=4) as fleet:
        await fleet.manager.update_weights(1)
        regions = [engine_of(trainer)._exposed.region for trainer in fleet.trainers]
        pulled = [0, 0]
        for index in (0, 1):

            def count(source: int, nbytes: int, index: int = index) -> None:
                if any(region.address <= source < region.address + region.nbytes for region in regions):
                    pulled[index] += nbytes

            engine_of(fleet.nodes[index])._wires.first.before_read = count
        await fleet.manager.update_weights(2)
        payload = sum(tensor.nbytes for tensor in TENSORS.values())
        assert payload <= sum(pulled) < 1.001 * payload  # alignment between pieces of the tail travels, too
        assert min(pulled) > 0.4 * payload


async def test_a_single_node_only_pulls(tmp_path: Path):
    async with fleet_of(TENSORS, tmp_path, nodes=1) as fleet:
        await fleet.manager.update_weights(1)
        assert engine_of(fleet.nodes[0])._intake.holder is None
        assert_bit_equal(fleet.replicas[0], 1, TENSORS)


@pytest.mark.parametrize("source", [RowShardedSource, ColumnShardedSource])
async def test_a_receiver_passes_its_share_on_while_it_still_pulls(source: type[RowShardedSource], tmp_path: Path):
    """A receiver's last bucket is held until the next node has most of what came before."""
    tensors = {f"w{index}": torch.randn(400, 900) for index in range(8)}
    payload = sum(tensor.nbytes for tensor in tensors.values())
    async with fleet_of(tensors, tmp_path, nodes=2, trainers=1, source=source, block_kilobytes=BLOCK_KB) as fleet:
        await fleet.manager.update_weights(1)
        first, second = (engine_of(node) for node in fleet.nodes)
        pulled, passed, enough, waited = [], [], threading.Event(), []

        def at_first(target: int, nbytes: int) -> None:
            pulled.append(nbytes)
            if sum(pulled) > payload * 3 // 4 and not waited:
                waited.append(enough.wait(60))

        def at_second(target: int, nbytes: int) -> None:
            passed.append(nbytes)
            if sum(passed) > payload // 2:
                enough.set()

        first._wires.first.after_read, second._wires.first.after_read = at_first, at_second
        await fleet.manager.update_weights(2)
        assert waited == [True]
        assert_bit_equal(fleet.replicas[1], 2, tensors)


# --- failures among several nodes -------------------------------------------------------------------------------------


async def abort_of(fleet: Fleet, version: int) -> TransportError:
    with pytest.raises(SyncAborted) as raised:
        await fleet.manager.update_weights(version)
    assert isinstance(raised.value.__cause__, TransportError)
    assert raised.value.__cause__.version == version
    return raised.value.__cause__


async def test_a_region_that_is_published_again_while_a_receiver_pulls_is_refused_everywhere(tmp_path: Path):
    async with fleet_of(TENSORS, tmp_path) as fleet:
        await fleet.manager.update_weights(1)
        stamp = engine_of(fleet.trainers[1])._exposed.stamp
        pulling = [threading.Event(), threading.Event()]
        """Nodes 0 and 2 have seen the first stamps, too: it is one publication that everybody reads."""

        def publish_again(target: int, nbytes: int) -> None:
            if nbytes > 1000:
                assert all(event.wait(60) for event in pulling)
                stamp.begin()
                stamp.finish(2)

        for node, event in zip((fleet.nodes[0], fleet.nodes[2]), pulling, strict=True):
            engine_of(node)._wires.first.after_read = lambda target, nbytes, event=event: nbytes > 1000 and event.set()

        engine_of(fleet.nodes[1])._wires.first.after_read = publish_again
        error = await abort_of(fleet, 2)
        assert (error.member, error.message) == ("trainer-1", "it published again while it was read")
        assert [replica.version for replica in fleet.replicas] == [1, 1, 1]
        await fleet.manager.update_weights(3)
        assert [replica.version for replica in fleet.replicas] == [3, 3, 3]


async def test_a_node_that_does_not_take_part_is_named_when_the_deadline_has_passed(tmp_path: Path):
    async with fleet_of(TENSORS, tmp_path, deadlines={"stage_s": 5.0}) as fleet:
        await fleet.manager.update_weights(1)
        fleet.nodes[0].before["stage"] = asyncio.Event().wait
        error = await abort_of(fleet, 2)
        assert isinstance(error, TransportTimeout)
        assert "bytes of node-0 not here within" in error.message
        fleet.nodes[0].before.clear()
        await fleet.manager.update_weights(3)
        assert [replica.version for replica in fleet.replicas] == [3, 3, 3]


async def test_a_byte_that_flips_at_a_receiver_is_noticed_on_every_node_and_read_again_from_its_owner(tmp_path: Path):
    async with fleet_of(TENSORS, tmp_path) as fleet:
        await fleet.manager.update_weights(1)
        flips = []

        def flip_once(target: int, nbytes: int) -> None:
            if nbytes > 2**16 and not flips:
                engine = engine_of(fleet.nodes[1])
                slot = next(memory for memory in engine._wires.slots.values() if _holds(memory, target))
                slot[target - slot.ctypes.data] ^= 1
                flips.append(target)

        engine_of(fleet.nodes[1])._wires.first.after_read = flip_once
        report = await fleet.manager.update_weights(2)
        assert (report.retries, report.pieces_repaired, len(flips)) == (0, len(fleet.nodes), 1)
        for replica in fleet.replicas:
            assert_bit_equal(replica, 2, TENSORS)


def _holds(memory: Any, address: int) -> bool:
    return memory.ctypes.data <= address < memory.ctypes.data + memory.nbytes


# --- options ----------------------------------------------------------------------------------------------------------


async def test_buckets_are_as_small_as_the_share_of_memory_demands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    tensors = {"w": torch.randn(2000, 900)}
    largest = {}
    for free_nbytes in (2**30, 2**20):
        monkeypatch.setattr(kimi_ckpt_engine, "free_host_nbytes", lambda free_nbytes=free_nbytes: free_nbytes)
        options = {"source": ColumnShardedSource, "nodes": 2, "block_kilobytes": BLOCK_KB, "kimi": {"mem_fraction": 1}}
        async with fleet_of(tensors, tmp_path, **options) as fleet:
            await fleet.manager.update_weights(1)
            largest[free_nbytes] = max(len(engine_of(node)._intake.bounce) for node in fleet.nodes)
            assert_bit_equal(fleet.replicas[1], 1, tensors)
    assert largest[2**20] <= 2**20 + 2**12 < largest[2**30]


async def test_a_share_of_memory_that_holds_no_piece_is_refused(tmp_path: Path):
    share = 2**20 / free_host_nbytes() / 1000
    async with fleet_of(TENSORS, tmp_path, kimi={"mem_fraction": share}) as fleet:
        with pytest.raises(ConfigError, match=r"mem_fraction=.* of the free memory of .* is \d+ bytes, less than"):
            await fleet.manager.update_weights(1)


async def test_the_bucket_size_bounds_every_pull(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("verl.checkpoint_engine.links.cuts.LEAST_PART_NBYTES", 2**24)
    largest = []
    async with fleet_of(
        TENSORS, tmp_path, kimi={"bucket_size_megabytes": 2}, update_weights_bucket_megabytes=64
    ) as fleet:
        await fleet.manager.update_weights(1)
        engine_of(fleet.nodes[0])._wires.first.before_read = lambda source, nbytes: largest.append(nbytes)
        await fleet.manager.update_weights(2)
    assert 2**20 < max(largest) <= 2 * 2**20


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"mem_fraction": 0}, "mem_fraction must be above 0 and at most 1, not 0"),
        ({"mem_fraction": 1.5}, "mem_fraction must be above 0 and at most 1, not 1.5"),
        ({"bucket_size_megabytes": 0}, "bucket_size_megabytes must be at least 1, not 0"),
        ({"in_flight": 0}, "in_flight must be at least 1, not 0"),
        ({"p2p_protocol": "ib"}, "p2p_protocol"),
        ({"rebuild_groups": True}, "rebuild_group"),
    ],
)
def test_options_that_cannot_work_are_refused(options: dict[str, Any], message: str):
    config = CheckpointEngineConfig(backend="kimi_ckpt_engine", engine_kwargs={"kimi_ckpt_engine": options})
    with pytest.raises(ConfigError, match=message):
        resolve_backend(config)


def test_a_chain_is_refused():
    config = CheckpointEngineConfig.from_mapping({"backend": "kimi_ckpt_engine", "topology": "chain"})
    with pytest.raises(ConfigError, match="possible: auto, p2p_broadcast"):
        resolve_backend(config)


def options_of(**values: Any) -> KimiCkptEngineOptions:
    return strict.from_mapping(KimiCkptEngineOptions, {"p2p_protocol": "rdma", **values}, "test")


@pytest.fixture
def four_devices(tmp_path: Path) -> Path:
    for index in range(4):
        (tmp_path / f"mlx5_{index}").mkdir()
    return tmp_path


@pytest.mark.parametrize(
    ("local", "options", "of_rank", "of_node"),
    [
        ((0, 8), {}, "mlx5_0", "mlx5_0,mlx5_1,mlx5_2,mlx5_3"),
        ((7, 8), {}, "mlx5_3", "mlx5_0,mlx5_1,mlx5_2,mlx5_3"),
        ((7, 8), {"rdma_devices": "mlx5_1, mlx5_2"}, "mlx5_1,mlx5_2", "mlx5_1,mlx5_2"),
        ((3, 4), {"p2p_protocol": "tcp"}, "", ""),
    ],
)
def test_a_rank_takes_the_rdma_device_of_its_place_and_a_node_takes_all(
    four_devices: Path, monkeypatch: pytest.MonkeyPatch, local: Any, options: Any, of_rank: str, of_node: str
):
    for name, value in zip(("LOCAL_RANK", "LOCAL_WORLD_SIZE"), local, strict=True):
        monkeypatch.setenv(name, str(value))
    chosen = options_of(**options)
    assert _rdma_devices(chosen, is_rank=True, present_in=four_devices) == of_rank
    assert _rdma_devices(chosen, is_rank=False, present_in=four_devices) == of_node


@pytest.mark.parametrize(
    ("local", "options", "message"),
    [
        ((0, 4), {"rdma_devices": "mlx5_0,mlx5_9"}, "no RDMA device mlx5_9 on .*; there are: mlx5_0, mlx5_1"),
        ((0, 3), {}, "rdma_devices is empty, and more RDMA devices than local ranks"),
    ],
)
def test_rdma_devices_that_do_not_fit_are_refused(
    four_devices: Path, monkeypatch: pytest.MonkeyPatch, local: Any, options: Any, message: str
):
    for name, value in zip(("LOCAL_RANK", "LOCAL_WORLD_SIZE"), local, strict=True):
        monkeypatch.setenv(name, str(value))
    with pytest.raises(ConfigError, match=message):
        _rdma_devices(options_of(**options), is_rank=True, present_in=four_devices)


def test_rdma_without_a_device_says_what_to_use(tmp_path: Path):
    with pytest.raises(ConfigError, match="no RDMA device at all on .*Use p2p_protocol=tcp"):
        _rdma_devices(options_of(), is_rank=False, present_in=tmp_path)


@pytest.mark.parametrize(
    ("hosts", "devices", "receivers"),
    [("aa", ["", ""], 1), ("ab", ["", ""], 2), ("aa", ["mlx5_0", "mlx5_1"], 2), ("aab", ["mlx5_0", "mlx5_0", ""], 2)],
)
def test_there_are_as_many_receivers_as_network_devices_on_the_trainers_side(
    hosts: str, devices: list[str], receivers: int
):
    trainers = [
        Member(role="trainer", index=index, host=host, address=msgspec.json.encode(address).decode())
        for index, (host, device) in enumerate(zip(hosts, devices, strict=True))
        for address in [OwnerAddress(b"", 0, 0, 0, device)]
    ]
    nodes = [Member(role="node", index=index, host="c") for index in range(3)]
    assert len(KimiCkptEngine.build_topology(trainers, nodes).receivers) == receivers
