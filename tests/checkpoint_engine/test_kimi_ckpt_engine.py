"""`kimi_ckpt_engine` among several nodes: who pulls, who passes on, and what is noticed when something goes wrong.

Most of it runs over a wire to memory of this process; the real one is in the contract and failure suites.
"""

from __future__ import annotations

import asyncio
import gc
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from tests.checkpoint_engine.fakes import ColumnShardedSource, Fleet, RowShardedSource, soon
from tests.checkpoint_engine.test_collective import native_threads
from tests.checkpoint_engine.test_contract import BLOCK_KB, assert_bit_equal, tensors_of
from tests.checkpoint_engine.test_one_sided import MemoryWire, engine_of

pytest.importorskip("mooncake", reason="mooncake is not installed", exc_type=ImportError)

from verl.checkpoint_engine.backends.kimi_ckpt_engine import (
    KimiCkptEngine,
    NodeAddress,
    NoWire,
    Relay,
    _rdma_devices,
)
from verl.checkpoint_engine.config import CheckpointEngineConfig, KimiCkptEngineOptions
from verl.checkpoint_engine.errors import ConfigError, SyncAborted, TransportError, TransportTimeout
from verl.checkpoint_engine.parameter_server.host_memory import free_host_nbytes
from verl.checkpoint_engine.registry import CheckpointEngineRegistry, resolve_backend
from verl.utils import config as strict


@CheckpointEngineRegistry.register("kimi-in-memory")
class InMemory(KimiCkptEngine):
    def open_wire(self, topology: Any) -> Any:
        wire = super().open_wire(topology) if topology is not None and not self._owners_to_read() else MemoryWire()
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
        for version in range(3):
            expected = tensors_of(case, version)
            fleet.set_weights(expected)
            report = await fleet.manager.update_weights(version)
            for replica in fleet.replicas:
                assert_bit_equal(replica, version, expected)
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
        regions = [engine_of(trainer)._region for trainer in fleet.trainers]
        pulled = [0, 0]
        for index in (0, 1):

            def count(source: int, nbytes: int, index: int = index) -> None:
                if any(region.address <= source < region.address + region.nbytes for region in regions):
                    pulled[index] += nbytes

            engine_of(fleet.nodes[index])._wire.before_read = count
        await fleet.manager.update_weights(2)
        payload = sum(tensor.nbytes for tensor in TENSORS.values())
        assert payload <= sum(pulled) < 1.001 * payload  # alignment between pieces of the tail travels, too
        assert min(pulled) > 0.4 * payload
        assert [type(engine_of(node)._wire) for node in fleet.nodes[2:]] == [NoWire, NoWire]


async def test_a_single_node_only_pulls(tmp_path: Path):
    gc.collect()  # exceptions of earlier tests hold on to their groups
    assert soon(lambda: not native_threads("gloo_tcp_loop"))
    async with fleet_of(TENSORS, tmp_path, nodes=1) as fleet:
        await fleet.manager.update_weights(1)
        assert engine_of(fleet.nodes[0])._groups is None
        assert native_threads("gloo_tcp_loop") == native_threads("pt_gloo_runloop") == 0
        assert_bit_equal(fleet.replicas[0], 1, TENSORS)


@pytest.mark.parametrize("source", [RowShardedSource, ColumnShardedSource])
async def test_the_next_bucket_is_pulled_while_one_is_broadcast(source: type[RowShardedSource], tmp_path: Path):
    """No broadcast is done before the pull of the bucket after it is: one after the other would take for ever."""
    tensors = {"w": torch.randn(2000, 900)}
    options = {"nodes": 2, "trainers": 1, "source": source, "deadlines": {"stage_s": 20.0}}
    async with fleet_of(tensors, tmp_path, **options) as fleet:
        await fleet.manager.update_weights(1)
        engine = engine_of(fleet.nodes[0])
        broadcast, pulled, sent = engine._groups.broadcast, [], []

        def send(owner: int, memory: torch.Tensor) -> Any:
            flight = broadcast(owner, memory)
            if len(memory) < 2**16:  # a header
                return flight
            sent.append(len(memory))
            needed = min(len(sent) + 1, len(engine._buckets))
            return Held(flight, lambda: len(pulled) >= needed)

        engine._wire.after_read = lambda target, nbytes: pulled.append(nbytes) if nbytes > 2**16 else None
        engine._groups.broadcast = send
        await fleet.manager.update_weights(2)
        assert len(pulled) == len(sent) == len(engine._buckets) > 4
        assert_bit_equal(fleet.replicas[1], 2, tensors)


class Held:
    """A broadcast that is not done until `condition` holds."""

    def __init__(self, flight: Any, condition: Any) -> None:
        self._flight, self._condition = flight, condition

    def is_done(self) -> bool:
        return self._condition() and self._flight.is_done()


class LateWire:
    """Reads of which the second is done before the first."""

    def __init__(self) -> None:
        self.done: set[int] = set()

    def start(self, owner: int, ranges: Any, *, bounce: bool) -> int:
        return ranges[0].src_offset

    def is_done(self, transfer: int) -> bool:
        return transfer in self.done


class Sent:
    def __init__(self) -> None:
        self.order: list[int] = []

    def start(self, receiver: int, ranges: Any, *, bounce: bool) -> int:
        self.order.append(ranges[0].src_offset)
        return receiver

    def is_done(self, transfer: int) -> bool:
        return True


def test_buckets_are_passed_on_in_the_order_in_which_the_others_expect_them():
    from verl.checkpoint_engine.types import Range

    wire, sent = LateWire(), Sent()
    relay = Relay(wire, sent, 0, {(0, 10): 0, (0, 20): 0})  # type: ignore[arg-type]
    first, second = (relay.start(0, (Range(offset, offset, 5),), bounce=False) for offset in (10, 20))
    wire.done.add(20)
    assert not relay.is_done(second)
    assert sent.order == []
    wire.done.add(10)
    assert relay.is_done(first)
    assert relay.is_done(second)
    assert sent.order == [10, 20]


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
        stamp = engine_of(fleet.trainers[1])._stamp

        def publish_again(target: int, nbytes: int) -> None:
            if nbytes > 1000:
                stamp.begin()
                stamp.finish(2)

        engine_of(fleet.nodes[1])._wire.after_read = publish_again
        error = await abort_of(fleet, 2)
        assert (error.member, error.message) == ("trainer-1", "it published again while it was read")
        assert [replica.version for replica in fleet.replicas] == [1, 1, 1]
        await fleet.manager.update_weights(3)
        assert [replica.version for replica in fleet.replicas] == [3, 3, 3]


async def test_a_receiver_of_which_another_version_is_asked_for_sends_nothing(tmp_path: Path):
    async with fleet_of(TENSORS, tmp_path, nodes=2, trainers=1) as fleet:
        await fleet.manager.update_weights(1)
        engine = engine_of(fleet.nodes[0])
        header = engine._groups.header
        engine._groups.header = lambda version, owner: header(version + 1, owner)
        error = await abort_of(fleet, 2)
        assert "node-0 sends version 3 where version 2 is expected" in error.message
        await fleet.manager.update_weights(3)


async def test_a_node_that_does_not_take_part_is_named_when_the_deadline_has_passed(tmp_path: Path):
    async with fleet_of(TENSORS, tmp_path, deadlines={"stage_s": 3.0}) as fleet:
        await fleet.manager.update_weights(1)
        fleet.nodes[0].before["stage"] = asyncio.Event().wait
        error = await abort_of(fleet, 2)
        assert isinstance(error, TransportTimeout)
        assert str(error).endswith("no sign of life from node-0")
        fleet.nodes[0].before.clear()
        await fleet.manager.update_weights(3)
        assert [replica.version for replica in fleet.replicas] == [3, 3, 3]


async def test_a_byte_that_flips_at_a_receiver_is_noticed_on_every_node(tmp_path: Path):
    async with fleet_of(TENSORS, tmp_path, retries=1) as fleet:
        await fleet.manager.update_weights(1)
        flips = []

        def flip_once(target: int, nbytes: int) -> None:
            if nbytes > 2**16 and not flips:
                engine = engine_of(fleet.nodes[1])
                slot = next(memory for memory in engine._slots.values() if _holds(memory, target))
                slot[target - slot.ctypes.data] ^= 1
                flips.append(target)

        engine_of(fleet.nodes[1])._wire.after_read = flip_once
        report = await fleet.manager.update_weights(2)
        assert (report.retries, len(flips)) == (1, 1)
        for replica in fleet.replicas:
            assert_bit_equal(replica, 2, TENSORS)


def _holds(memory: Any, address: int) -> bool:
    return memory.ctypes.data <= address < memory.ctypes.data + memory.nbytes


# --- options ----------------------------------------------------------------------------------------------------------


async def test_groups_are_left_after_each_sync_and_built_anew_if_so_wished(tmp_path: Path):
    gc.collect()
    assert soon(lambda: not native_threads("gloo_tcp_loop"))
    async with fleet_of(TENSORS, tmp_path, nodes=2, kimi={"rebuild_group": True}) as fleet:
        for version in range(3):
            await fleet.manager.update_weights(version)
            assert_bit_equal(fleet.replicas[1], version, TENSORS)
            assert not engine_of(fleet.nodes[0])._groups.is_connected
            assert soon(lambda: not native_threads("gloo_tcp_loop"))
        assert fleet.nodes[0].calls.count("connect") == 1


async def test_groups_are_kept_from_sync_to_sync_otherwise(tmp_path: Path):
    async with fleet_of(TENSORS, tmp_path, nodes=2) as fleet:
        await fleet.manager.update_weights(1)
        groups = dict(engine_of(fleet.nodes[0])._groups._groups)
        await fleet.manager.update_weights(2)
        assert engine_of(fleet.nodes[0])._groups._groups == groups != {}


async def test_buckets_are_made_smaller_until_all_nodes_have_memory_for_them(tmp_path: Path):
    tensors = {"w": torch.randn(2000, 900)}
    async with fleet_of(tensors, tmp_path, source=ColumnShardedSource, nodes=2, block_kilobytes=BLOCK_KB) as fleet:
        await fleet.manager.update_weights(1)
        generous = [len(engine_of(node)._bounce) for node in fleet.nodes]
        prepare = fleet.nodes[1].member._engine._prepare_node

        def prepare_with_little_memory(plan: Any) -> str:
            address = msgspec.json.decode(prepare(plan), type=NodeAddress)
            return msgspec.json.encode(msgspec.structs.replace(address, bounce_nbytes=2**20)).decode()

        fleet.nodes[1].member._engine._prepare_node = prepare_with_little_memory
        fleet.manager._plan = None  # connect anew
        await fleet.manager.update_weights(2)
        frugal = [len(engine_of(node)._bounce) for node in fleet.nodes]
        assert generous[0] == generous[1] > 2**21
        assert 2**19 < frugal[0] == frugal[1] <= 2**20 + 2**12
        assert_bit_equal(fleet.replicas[1], 2, tensors)


async def test_a_share_of_memory_that_holds_no_piece_is_refused(tmp_path: Path):
    share = 2**20 / free_host_nbytes() / 1000
    async with fleet_of(TENSORS, tmp_path, kimi={"mem_fraction": share}) as fleet:
        with pytest.raises(ConfigError, match=r"mem_fraction=.* of the free memory of .* is \d+ bytes, less than one"):
            await fleet.manager.update_weights(1)


async def test_the_bucket_size_bounds_every_pull(tmp_path: Path):
    largest = []
    async with fleet_of(
        TENSORS, tmp_path, kimi={"bucket_size_megabytes": 2}, update_weights_bucket_megabytes=64
    ) as fleet:
        await fleet.manager.update_weights(1)
        engine_of(fleet.nodes[0])._wire.before_read = lambda source, nbytes: largest.append(nbytes)
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
