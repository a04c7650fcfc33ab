"""One-sided backends: what a node reads is the version it asked for, and failures leave nothing behind."""

from __future__ import annotations

import asyncio
import ctypes
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.checkpoint_engine.fakes import ColumnShardedSource, Fleet, RowShardedSource, open_descriptors, soon
from verl.checkpoint_engine.backends.one_sided import OneSidedEngine
from verl.checkpoint_engine.config import CheckpointEngineConfig
from verl.checkpoint_engine.errors import (
    BackendUnavailable,
    ConfigError,
    SyncAborted,
    TransportError,
    TransportTimeout,
)
from verl.checkpoint_engine.links.attempt import within
from verl.checkpoint_engine.links.stamps import Stamp
from verl.checkpoint_engine.links.wire import Wire, WireReader
from verl.checkpoint_engine.registry import CheckpointEngineRegistry, resolve_backend

TENSORS = {"w": torch.randn(1000, 700), "norm": torch.randn(33), "columns": torch.randn(40, 30)}


class MemoryWire(Wire):
    """Reads memory of this process."""

    def __init__(self) -> None:
        self.registered: list[int] = []
        self.log: list[str] = []
        self.before_read: Callable[[int, int], None] = lambda source, nbytes: None
        self.after_read: Callable[[int, int], None] = lambda target, nbytes: None

    def register(self, memory: np.ndarray) -> None:
        self.registered.append(memory.ctypes.data)
        self.log.append("register")

    def deregister(self, memory: np.ndarray) -> None:
        self.registered.remove(memory.ctypes.data)
        self.log.append("deregister")

    def address(self) -> bytes:
        return b"here"

    def connect(self, owner: int, address: bytes, timeout_s: float) -> None:
        self.log.append("connect")

    def read(self, owner: int, source: int, target: int, nbytes: int) -> tuple[int, int, int]:
        self.before_read(source, nbytes)
        return source, target, nbytes

    def is_done(self, transfer: tuple[int, int, int]) -> bool:
        source, target, nbytes = transfer
        ctypes.memmove(target, source, nbytes)
        self.after_read(target, nbytes)
        return True

    def close(self) -> None:
        self.log.append("close")
        self.registered.clear()


@CheckpointEngineRegistry.register("memory-wire")
class MemoryEngine(OneSidedEngine):
    def open_wire(self, topology: object) -> MemoryWire:
        return MemoryWire()


class CopyingWire(MemoryWire):
    copies = True


@CheckpointEngineRegistry.register("copying-wire")
class CopyingEngine(OneSidedEngine):
    def open_wire(self, topology: object) -> CopyingWire:
        return CopyingWire()


def fleet_of(tmp_path: Path, **config: Any) -> Fleet:
    return Fleet(TENSORS, tmp_path, **{"trainers": 2, "backend": "memory-wire", "retries": 0, **config})


def engine_of(member: Any) -> Any:
    return member.member._engine


async def abort_of(fleet: Fleet, version: int) -> TransportError:
    with pytest.raises(SyncAborted) as raised:
        await fleet.manager.update_weights(version)
    assert isinstance(raised.value.__cause__, TransportError)
    assert (raised.value.__cause__.version, raised.value.__cause__.phase) == (version, "stage")
    return raised.value.__cause__


async def test_memory_is_registered_once_per_plan_and_slot(tmp_path: Path):
    async with fleet_of(tmp_path) as fleet:
        for version in range(5):
            await fleet.manager.update_weights(version)
        assert engine_of(fleet.trainers[0])._wires.first.log == ["register"] * 3  # pieces, stamp, deltas
        assert engine_of(fleet.nodes[0])._wires.first.log == ["register", "connect", "connect", "register", "register"]


async def test_a_slot_file_that_was_replaced_is_deregistered(tmp_path: Path):
    async with fleet_of(tmp_path) as fleet:
        await fleet.manager.update_weights(1)
        wire, node = engine_of(fleet.nodes[0])._wires.first, fleet.nodes[0].member
        await fleet.manager.update_weights(2)
        await node.begin(3)
        await node.drop()
        await fleet.manager.update_weights(3)
        assert wire.log[-2:] == ["deregister", "register"]
        assert len(wire.registered) == 3


async def test_a_region_that_holds_an_older_version_is_refused(tmp_path: Path):
    async with fleet_of(tmp_path) as fleet:
        await fleet.manager.update_weights(1)
        stamp = engine_of(fleet.trainers[1])._exposed.stamp
        fleet.nodes[0].before["stage"] = lambda: stamp.finish(1)
        error = await abort_of(fleet, 2)
        assert (error.member, error.message) == ("trainer-1", "it holds version 1")
        assert fleet.replicas[0].version == 1
        fleet.nodes[0].before.clear()
        await fleet.manager.update_weights(3)
        assert fleet.replicas[0].version == 3


async def test_a_region_that_is_being_written_is_refused(tmp_path: Path):
    async with fleet_of(tmp_path) as fleet:
        await fleet.manager.update_weights(1)
        fleet.nodes[0].before["stage"] = engine_of(fleet.trainers[0])._exposed.stamp.begin
        error = await abort_of(fleet, 2)
        assert (error.member, error.message) == ("trainer-0", "it is publishing")


async def test_a_region_that_is_published_again_while_it_is_read_is_refused(tmp_path: Path):
    async with fleet_of(tmp_path) as fleet:
        await fleet.manager.update_weights(1)
        stamp = engine_of(fleet.trainers[1])._exposed.stamp

        def publish_again(target: int, nbytes: int) -> None:
            if nbytes > 1000:
                stamp.begin()
                stamp.finish(2)

        engine_of(fleet.nodes[0])._wires.first.after_read = publish_again
        error = await abort_of(fleet, 2)
        assert (error.member, error.message) == ("trainer-1", "it published again while it was read")


async def test_another_process_at_an_owners_address_is_not_the_owner(tmp_path: Path):
    async with fleet_of(tmp_path) as fleet:
        await fleet.manager.update_weights(1)

        def replace() -> None:
            engine_of(fleet.trainers[1])._exposed.stamp._words[0] += 1

        fleet.nodes[0].before["stage"] = replace
        error = await abort_of(fleet, 2)
        assert (error.member, error.message) == ("trainer-1", "another process answers at its address")


async def test_a_stage_that_is_given_up_ends_soon(tmp_path: Path):
    async with fleet_of(tmp_path) as fleet:
        await fleet.manager.update_weights(1)
        engine = engine_of(fleet.nodes[0])
        reached = threading.Event()
        engine._wires.first.is_done = lambda transfer: reached.set()  # which is not that it is
        syncing = asyncio.ensure_future(fleet.manager.update_weights(2))
        assert await asyncio.to_thread(reached.wait, 60)
        syncing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asyncio.wait_for(syncing, 60)
        await asyncio.wait_for(fleet.nodes[0].member._run(lambda: None), 60)
        assert engine._wires.first is None


async def test_a_stage_that_is_given_up_before_it_begins_ends_at_once(tmp_path: Path):
    async with fleet_of(tmp_path) as fleet:
        await fleet.manager.update_weights(1)
        node, engine = fleet.nodes[0].member, engine_of(fleet.nodes[0])
        await node.begin(2)
        engine.interrupt()
        with pytest.raises(TransportError, match="given up by the manager"):
            engine.receive_weights(2, node._open_arena)


async def test_a_stage_that_is_given_up_while_it_is_queued_never_begins(tmp_path: Path):
    async with fleet_of(tmp_path) as fleet:
        await fleet.manager.update_weights(1)
        node, busy = fleet.nodes[0].member, threading.Event()
        blocking = asyncio.ensure_future(node._run(busy.wait))
        staging = asyncio.ensure_future(node.stage(2))
        await asyncio.sleep(0)
        staging.cancel()
        with pytest.raises(asyncio.CancelledError):
            await staging
        busy.set()
        await blocking
        await fleet.manager.update_weights(2)
        assert fleet.replicas[0].version == 2


# --- wires that copy --------------------------------------------------------------------------------------------------

BOTH_WAYS = {"w": torch.randn(1000, 700), "norm": torch.randn(33)}
"""Straight to the slot, and through the bounce buffer."""


@pytest.mark.parametrize("threads", [1, 2, 5])
async def test_what_a_wire_copies_is_digested_as_it_arrives(
    threads: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("verl.checkpoint_engine.backends.one_sided.memory_threads", lambda: threads)
    monkeypatch.setattr("verl.checkpoint_engine.links.copying.LEAST_NBYTES", 2**19)
    async with Fleet(BOTH_WAYS, tmp_path, backend="copying-wire", block_kilobytes=64) as fleet:
        engine = engine_of(fleet.nodes[0])
        for version in range(3):
            values = {name: torch.randn_like(values) for name, values in BOTH_WAYS.items()}
            fleet.set_weights(values)
            await fleet.manager.update_weights(version)
            assert torch.equal(fleet.replicas[0].weights["w"], values["w"])
            assert torch.equal(fleet.replicas[0].weights["norm"], values["norm"])
            arrived = engine.digests_on_arrival(version)
            assert arrived.known.all()
            assert engine.digests_on_arrival(version + 1) is None
        assert len(engine._wires.open) == threads
        assert all(wire.log == engine._wires.first.log for wire in engine._wires.open)


async def test_a_bit_that_flips_as_a_wire_copies_is_found_and_its_piece_read_again(tmp_path: Path):
    async with Fleet(BOTH_WAYS, tmp_path, backend="copying-wire", block_kilobytes=64, retries=0) as fleet:
        await fleet.manager.update_weights(1)
        flips = [100]

        def flip_once(target: int, nbytes: int) -> None:
            if nbytes > 1000 and flips:
                ctypes.c_uint8.from_address(target + flips.pop()).value ^= 1

        for wire in engine_of(fleet.nodes[0])._wires.open:
            wire.after_read = flip_once
        report = await fleet.manager.update_weights(2)
        assert (report.pieces_repaired, flips) == (1, [])
        assert torch.equal(fleet.replicas[0].weights["w"], BOTH_WAYS["w"])


@pytest.mark.parametrize("source", [RowShardedSource, ColumnShardedSource])
async def test_only_pieces_that_arrived_wrong_are_read_again(source: type[RowShardedSource], tmp_path: Path):
    tensors = {"w": torch.randn(640, 200), "norm": torch.randn(7)}
    async with Fleet(
        tensors, tmp_path, trainers=2, backend="memory-wire", source=source, block_kilobytes=16, retries=0
    ) as fleet:
        await fleet.manager.update_weights(1)
        node, reads = fleet.nodes[0], []
        wrong = [3, 17]

        def damage() -> None:
            view, plan = node.member._open_arena.writable_view(), node.member._plan
            for piece in wrong:
                view.bytes[int(plan.extents.offset[piece])] ^= 1
            engine_of(node)._wires.first.before_read = lambda source, nbytes: reads.append(nbytes)

        node.after["stage"] = damage
        report = await fleet.manager.update_weights(2)
        plan = node.member._plan
        assert (report.retries, report.pieces_repaired) == (0, 2)
        assert [nbytes for nbytes in reads if nbytes != Stamp.NBYTES] == plan.extents.nbytes[wrong].tolist()
        assert torch.equal(fleet.replicas[0].weights["w"], tensors["w"])


async def test_a_piece_that_is_wrong_at_its_owner_aborts_the_sync(tmp_path: Path):
    async with fleet_of(tmp_path) as fleet:
        await fleet.manager.update_weights(1)
        trainer = fleet.trainers[0]
        trainer.after["published"] = lambda: engine_of(trainer)._exposed.region.bytes[:1].bitwise_xor_(1)
        with pytest.raises(SyncAborted, match="are not what the trainer sent") as raised:
            await fleet.manager.update_weights(2)
        assert raised.value.phase == "verify"


async def test_a_version_of_which_much_is_wrong_is_not_repaired(tmp_path: Path):
    async with fleet_of(tmp_path, block_kilobytes=4) as fleet:
        await fleet.manager.update_weights(1)
        node = fleet.nodes[0]
        node.after["stage"] = lambda: node.member._open_arena.writable_view().bytes.bitwise_xor_(1)
        with pytest.raises(SyncAborted, match="are not what the trainer sent"):
            await fleet.manager.update_weights(2)


async def test_a_region_that_is_published_again_is_not_read_to_repair_a_piece(tmp_path: Path):
    async with fleet_of(tmp_path) as fleet:
        await fleet.manager.update_weights(1)
        node, stamp = fleet.nodes[0], engine_of(fleet.trainers[0])._exposed.stamp

        def damage_and_publish_again() -> None:
            node.member._open_arena.writable_view().bytes[0] ^= 1
            stamp.begin()

        node.after["stage"] = damage_and_publish_again
        with pytest.raises(SyncAborted, match="trainer-0.* it is publishing"):
            await fleet.manager.update_weights(2)


async def test_a_copy_that_is_not_done_at_once_is_waited_for_before_it_is_digested(tmp_path: Path):
    async with Fleet(BOTH_WAYS, tmp_path, backend="copying-wire") as fleet:
        await fleet.manager.update_weights(1)
        asked: dict[Any, int] = {}
        for wire in engine_of(fleet.nodes[0])._wires.open:

            def is_done(transfer: tuple[int, int, int], copy: Callable[..., bool] = wire.is_done) -> bool:
                asked[transfer] = asked.get(transfer, 0) + 1
                return asked[transfer] % 3 == 0 and copy(transfer)

            wire.is_done = is_done
        fleet.set_weights({name: torch.randn_like(values) for name, values in BOTH_WAYS.items()})
        assert (await fleet.manager.update_weights(2)).retries == 0
        assert asked
        assert engine_of(fleet.nodes[0]).digests_on_arrival(2).known.all()


async def test_without_verification_nothing_is_digested_as_it_arrives(tmp_path: Path):
    async with Fleet(BOTH_WAYS, tmp_path, backend="copying-wire", verify=False) as fleet:
        await fleet.manager.update_weights(1)
        assert engine_of(fleet.nodes[0]).digests_on_arrival(1) is None
        assert torch.equal(fleet.replicas[0].weights["w"], BOTH_WAYS["w"])


def test_a_transfer_of_an_older_version_is_refused():
    memory = np.zeros(8, np.uint8)
    wire = MemoryWire()
    older, newer = (WireReader(wire, {}, memory, memory, version) for version in (1, 2))
    transfer = older.read(0, memory.ctypes.data, memory.ctypes.data, 8)
    with pytest.raises(TransportError, match="a transfer of version 1 ended late") as raised:
        newer.is_done(transfer)
    assert (raised.value.version, raised.value.member) == (2, "trainer-0")
    assert older.is_done(transfer)


def test_a_call_that_does_not_return_is_given_up():
    release = threading.Event()
    with pytest.raises(TransportTimeout, match=r"shaking hands has not ended within 0\.1 s"):
        within(0.1, release.wait, "shaking hands")
    release.set()
    assert within(60.0, lambda: 3, "counting") == 3


def test_a_call_that_fails_raises_what_was_wrong_with_it():
    def fail() -> None:
        raise ValueError("no such peer")

    with pytest.raises(ValueError, match="no such peer"):
        within(60.0, fail, "shaking hands")


# --- with the libraries, between processes ----------------------------------------------------------------------------

LIBRARIES = [
    pytest.param(
        name, kwargs, id=label, marks=pytest.mark.skipif(find_spec(name) is None, reason=f"{name} is not installed")
    )
    for label, name, kwargs in (
        ("nixl", "nixl", {}),
        ("nixl-three-threads", "nixl", {"num_threads": 3}),
        ("nixl-tcp", "nixl", {"ucx_tls": "tcp"}),
        ("mooncake", "mooncake", {"host": "127.0.0.1"}),
    )
]


@pytest.mark.parametrize(("backend", "options"), LIBRARIES)
async def test_nothing_is_left_open_when_a_fleet_closes(backend: str, options: dict[str, Any], tmp_path: Path):
    async def one_sync() -> None:
        async with Fleet(TENSORS, tmp_path, backend=backend, engine_kwargs={backend: options}) as fleet:
            await fleet.manager.update_weights(1)

    await one_sync()
    before = resources()
    for _ in range(3):
        await one_sync()
    assert soon(lambda: all(now <= then for now, then in zip(resources(), before, strict=True))), (resources(), before)


def resources() -> tuple[int, int, int]:
    """Threads, sockets and mapped shared-memory files of this process."""
    descriptors = open_descriptors()
    sockets = sum(target.startswith("socket:") for target in descriptors)
    slots = sum("slot-" in line for line in Path("/proc/self/maps").read_text().splitlines())
    return len(os.listdir("/proc/self/task")), sockets, slots


@pytest.mark.skipif(find_spec("nixl") is None, reason="nixl is not installed")
def test_a_read_that_comes_again_needs_nothing_new_until_an_address_changes():
    from verl.checkpoint_engine.backends.nixl import NixlWire

    source = np.random.default_rng(0).integers(0, 256, 2**21, np.uint8)
    target = np.zeros_like(source)
    owner = NixlWire("owner", tls=None, error_handling="peer", num_workers=1, progress=True)
    owner.register(source)
    node = NixlWire("node", tls="sm,self", error_handling="none", num_workers=1, progress=False)

    def read(nbytes: int) -> Any:
        target[:] = 0
        reading = node.read(0, source.ctypes.data, target.ctypes.data, nbytes)
        while not node.is_done(reading):
            time.sleep(0.001)
        assert np.array_equal(target[:nbytes], source[:nbytes])
        assert not target[nbytes:].any()
        return reading.handle

    try:
        node.register(target)
        node.connect(0, owner.address(), 60)
        first = read(2**20 + 1)
        assert read(2**21) is not first
        source[5] ^= 1
        assert read(2**20 + 1) is first
        node.connect(0, owner.address(), 60)
        second = read(2**20 + 1)
        assert second is not first
        node.deregister(target)
        node.register(target)
        assert read(2**20 + 1) is not second
    finally:
        node.close()
        owner.close()


@pytest.mark.skipif(find_spec("nixl") is None, reason="nixl is not installed")
def test_an_owner_that_waits_for_reads_sleeps():
    """For as long as its rank trains: one that looked every millisecond took 4 % of a core."""
    from verl.checkpoint_engine.backends.nixl import NixlWire

    others = set(os.listdir("/proc/self/task"))
    owner = NixlWire("owner", tls=None, error_handling="peer", num_workers=1, progress=True)
    try:
        owner.register(np.zeros(2**20, np.uint8))
        threads = set(os.listdir("/proc/self/task")) - others
        assert soon(lambda: wakes(threads) > 0), "its threads have waited"
        assert soon(lambda: wakes_per_second(threads) < 300)  # once it has started
    finally:
        owner.close()


def wakes(threads: set[str]) -> int:
    rows = [f"/proc/self/task/{thread}/status" for thread in threads]
    return sum(int(Path(row).read_text().split("voluntary_ctxt_switches:")[1].split()[0]) for row in rows)


def wakes_per_second(threads: set[str]) -> float:
    before, began = wakes(threads), time.monotonic()
    time.sleep(1.0)
    return (wakes(threads) - before) / (time.monotonic() - began)


class BusyPorts:
    """A transfer engine that finds its port taken for the first `conflicts` times that one is made."""

    def __init__(self, conflicts: int) -> None:
        self.conflicts = conflicts
        self.made = 0

    def __call__(self) -> BusyPorts:
        self.made += 1
        return self

    def initialize(self, *_: str) -> int:
        return 0 if self.made > self.conflicts else -4

    def get_rpc_port(self) -> int:
        return 16000 + self.made


@pytest.mark.skipif(find_spec("mooncake") is None, reason="mooncake is not installed")
def test_a_port_that_is_taken_is_tried_again_a_few_times():
    from verl.checkpoint_engine.backends.mooncake import PORT_ATTEMPTS, MooncakeWire

    place = {"host": "127.0.0.1", "protocol": "tcp", "devices": ""}
    wire = MooncakeWire(**place, new_engine=BusyPorts(conflicts=PORT_ATTEMPTS - 1))
    assert wire.address() == f"127.0.0.1:{16000 + PORT_ATTEMPTS}".encode()
    with pytest.raises(TransportError, match=r"Mooncake cannot start on 127\.0\.0\.1 \(tcp\): error -4"):
        MooncakeWire(**place, new_engine=BusyPorts(conflicts=PORT_ATTEMPTS))


@pytest.mark.skipif(find_spec("mooncake") is None, reason="mooncake is not installed")
def test_an_rdma_device_that_does_not_exist_is_refused_with_those_that_do(tmp_path: Path):
    from verl.checkpoint_engine.backends.mooncake import rdma_devices
    from verl.checkpoint_engine.config import MooncakeOptions

    (tmp_path / "mlx5_0").mkdir()
    options = MooncakeOptions(protocol="rdma", rdma_devices="mlx5_0,mlx5_7")
    message = rf"no RDMA device mlx5_7 on {socket.gethostname()}; there are: mlx5_0"
    with pytest.raises(ConfigError, match=message):
        rdma_devices(options, tmp_path)
    assert rdma_devices(MooncakeOptions(protocol="rdma", rdma_devices="mlx5_0"), tmp_path) == "mlx5_0"
    assert rdma_devices(MooncakeOptions(), tmp_path) == ""


ALL_PORTS_TAKEN = """
import socket, subprocess, sys
subprocess.run(["ip", "link", "set", "lo", "up"], check=True)
from verl.checkpoint_engine.backends.mooncake import MooncakeWire
from verl.checkpoint_engine.errors import TransportError
place = {"host": "127.0.0.1", "protocol": "tcp", "devices": ""}
MooncakeWire(**place).close()
print("started", file=sys.stderr, flush=True)
held = [socket.create_server(("0.0.0.0", port)) for port in range(15000, 17001)]
try:
    MooncakeWire(**place)
except TransportError as exc:
    print(exc)
"""


@pytest.mark.skipif(find_spec("mooncake") is None, reason="mooncake is not installed")
def test_mooncake_starts_silently_and_tells_why_it_does_not():
    command = ["unshare", "--net", "sh", "-c", 'ulimit -n 4096; exec "$@"', "sh", sys.executable, "-c", ALL_PORTS_TAKEN]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    if "unshare failed" in done.stderr:
        pytest.skip("this machine does not allow network namespaces")
    assert "Mooncake cannot start on 127.0.0.1 (tcp)" in done.stdout, done.stderr
    assert "free port from 15000 to 17000" in done.stdout
    silent, _, told = done.stderr.partition("started\n")
    assert silent == ""
    assert "No valid port" in told


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"nixl": {"ucx_tsl": "tcp"}}, "Did you mean 'ucx_tls'"),
        ({"nixl": {"error_handling": "some"}}, "error_handling"),
        ({"nixl": {"num_workers": 0}}, "num_workers must be at least 1"),
        ({"nixl": {"num_threads": 0}}, "num_threads must be at least 1"),
        ({"mooncake": {"protocol": "rmda"}}, "protocol"),
        ({"mooncake": {"rdma_devices": "mlx5_0"}}, "rdma_devices=mlx5_0 needs protocol=rdma, not protocol=tcp"),
        ({"kimi_ckpt_engine": {"rdma_devices": "mlx5_0"}}, "rdma_devices=mlx5_0 needs p2p_protocol=rdma"),
    ],
)
def test_a_bad_option_is_refused_on_the_driver(options: dict[str, Any], message: str):
    with pytest.raises(ConfigError, match=message):
        resolve_backend(CheckpointEngineConfig(engine_kwargs=options))


def test_a_missing_mooncake_names_the_extra_and_the_system_library(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "mooncake", None)
    for name in ("mooncake.engine", "verl.checkpoint_engine.backends.mooncake"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    with pytest.raises(BackendUnavailable, match=r"verl-sync\[mooncake\]'.*libibverbs1"):
        resolve_backend(CheckpointEngineConfig(backend="mooncake"))
