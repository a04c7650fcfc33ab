"""Rollout nodes that a process on another host holds for a publisher: over a connection, here of this host."""

from __future__ import annotations

import asyncio
import os
import resource
import signal
import subprocess
import sys
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path

import msgspec
import pytest
import torch

from benchmarks.free_ports import free_port
from benchmarks.namespaces import Host
from tests import forked
from tests.checkpoint_engine.fakes import Fleet, RecordingReplica, arenas_in, soon, spare_slot
from tests.checkpoint_engine.test_namespaces import hosts_or_skip
from verl.checkpoint_engine.config import CheckpointEngineConfig
from verl.checkpoint_engine.errors import ConfigError, IntegrityError, SyncAborted, TransportError
from verl.checkpoint_engine.memory.committed import committed_version
from verl.checkpoint_engine.node import PORT, main
from verl.checkpoint_engine.publisher.hosts import HERE, Hosts
from verl.checkpoint_engine.publisher.node_key import key_in, make_key
from verl.checkpoint_engine.publisher.node_link import (
    METHODS,
    Answer,
    Call,
    Cancel,
    Failure,
    Link,
    Message,
    ask_in,
    let_in,
)
from verl.checkpoint_engine.publisher.node_server import serve
from verl.checkpoint_engine.publisher.remote_node import RemoteNode
from verl.checkpoint_engine.publisher.reports import CLAIM, MAKE, RELEASE, TAKE
from verl.checkpoint_engine.sync.manager import CheckpointEngineManager
from verl.checkpoint_engine.sync.members import NodePort, methods_of

KEY = b"k" * 64


def weights(seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {f"layers.{number}.weight": torch.randn(64, 32, generator=generator) for number in range(4)}


@dataclass
class Place:
    port: int
    serving: asyncio.Task[None]


@asynccontextmanager
async def serving(shm_dir: Path, key: bytes = KEY) -> AsyncIterator[Place]:
    """A process that holds nodes, here a task."""
    port = free_port()
    task = asyncio.create_task(serve("127.0.0.1", port, key, shm_dir))
    while True:
        try:
            (await ask_in("127.0.0.1", port, key)).close()
            break
        except OSError:
            assert not task.done()
            await asyncio.sleep(0.01)
    try:
        yield Place(port, task)
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


def remote(port: int, config: CheckpointEngineConfig, index: int = 1, key: bytes = KEY) -> RemoteNode:
    return RemoteNode(index, ("127.0.0.1", port), key, config, "test-remote")


@asynccontextmanager
async def fleet_with(node: RemoteNode, fleet: Fleet) -> AsyncIterator[RecordingReplica]:
    """`fleet`'s trainer ranks push to `node` alone, where a replica is."""
    replica = RecordingReplica("there", node.index)
    fleet.manager = CheckpointEngineManager(config=fleet.config, trainers=fleet.trainers, nodes=[node])
    await fleet.manager.add_replicas([replica])
    try:
        yield replica
    finally:
        await fleet.manager.close()


def assert_equal(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_everything_that_a_node_can_be_asked_for_can_be_sent():
    assert METHODS.keys() == methods_of(NodePort) | {"open", CLAIM, MAKE, RELEASE, TAKE}


async def test_versions_arrive_are_verified_and_the_arena_goes_with_the_publisher(tmp_path: Path):
    fleet = Fleet(weights(0), tmp_path / "here", backend="tcp")
    async with serving(tmp_path) as place, fleet_with(remote(place.port, fleet.config), fleet) as replica:
        for version in range(3):
            fleet.set_weights(weights(version))
            report = await fleet.manager.update_weights(version)
            assert_equal(replica.weights, weights(version))
            assert report.members["stage"].slowest[-1].member == "node-1"
        assert [committed_version(arena) for arena in arenas_in(tmp_path)] == [2]
    assert arenas_in(tmp_path) == []


async def test_a_byte_that_flips_there_ends_as_it_would_here(tmp_path: Path):
    fleet = Fleet(weights(0), tmp_path / "here", backend="tcp", retries=0, delta="off")
    async with serving(tmp_path) as place, fleet_with(remote(place.port, fleet.config), fleet) as replica:
        await fleet.manager.update_weights(0)
        node = fleet.manager._membership.nodes[0]
        verify = node.verify

        async def spoiled(version: int, digests: bytes) -> int:
            with spare_slot(tmp_path).open("r+b") as slot:
                for offset in range(0, os.fstat(slot.fileno()).st_size, 512):  # too many to be fetched again
                    slot.seek(offset)
                    slot.write(b"\xff")
            return await verify(version, digests)

        node.verify = spoiled
        fleet.set_weights(weights(1))
        with pytest.raises(SyncAborted) as aborted:
            await fleet.manager.update_weights(1)
        assert isinstance(aborted.value.__cause__, IntegrityError)
        assert aborted.value.__cause__.member == "node-1"
        assert_equal(replica.weights, weights(0))


async def test_a_node_whose_process_is_gone_is_named_and_is_used_again_once_it_is_back(tmp_path: Path):
    fleet = Fleet(weights(0), tmp_path / "here", backend="tcp", retries=0)
    async with serving(tmp_path) as place, fleet_with(remote(place.port, fleet.config), fleet) as replica:
        await fleet.manager.update_weights(0)
        place.serving.cancel()
        await asyncio.gather(place.serving, return_exceptions=True)
        with pytest.raises(SyncAborted, match=f"127.0.0.1:{place.port}"):
            await fleet.manager.update_weights(1)
        with pytest.raises(TransportError, match="node` running there, with the same key"):
            await fleet.manager.update_weights(1)
        place.serving = asyncio.create_task(serve("127.0.0.1", place.port, KEY, tmp_path))
        await asyncio.sleep(0)
        fleet.set_weights(weights(2))
        for _ in range(500):  # until it listens
            try:
                await fleet.manager.update_weights(2)
                break
            except TransportError:
                await asyncio.sleep(0.01)
        assert_equal(replica.weights, weights(2))
        place.serving.cancel()
        await asyncio.gather(place.serving, return_exceptions=True)


async def test_whoever_waits_for_an_answer_is_told_that_the_node_has_gone():
    async def go_amid_the_second_call(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        link = await let_in(reader, writer, KEY)
        opening = await link.receive()
        await link.send(Answer(opening.number, msgspec.Raw(msgspec.msgpack.encode(None))))
        await link.receive()
        link.close()

    async with await asyncio.start_server(go_amid_the_second_call, "127.0.0.1", 0) as server:
        node = remote(server.sockets[0].getsockname()[1], CheckpointEngineConfig())
        with pytest.raises(TransportError, match="has gone"):
            await asyncio.wait_for(node.ask(MAKE, ()), 60)
        await node.close()


async def test_a_publisher_that_is_gone_leaves_nothing(tmp_path: Path):
    fleet = Fleet(weights(0), tmp_path / "here", backend="tcp")
    async with serving(tmp_path) as place, fleet_with(node := remote(place.port, fleet.config), fleet):
        await fleet.manager.update_weights(0)
        assert len(arenas_in(tmp_path)) == 1
        node._link.close()  # what the end of its process does
        for _ in range(1000):
            if not arenas_in(tmp_path):
                break
            await asyncio.sleep(0.01)
        assert arenas_in(tmp_path) == []


async def test_who_does_not_know_the_key_gets_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    caplog.set_level("INFO")
    async with serving(tmp_path) as place:
        node = remote(place.port, CheckpointEngineConfig(), key=b"x" * 64)
        with pytest.raises(TransportError, match="it has another key") as refused:
            await node.drop()
        assert refused.value.member == "node-1"
        await node.close()
        reader, writer = await asyncio.open_connection("127.0.0.1", place.port)
        writer.write(b"\0" * 4096)
        while await reader.read(4096):
            pass
        writer.close()
        assert soon(lambda: "was not let in: it has another key" in caplog.text)


async def test_what_the_other_end_has_not_sent_ends_the_connection(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    async with serving(tmp_path) as place:
        link = await ask_in("127.0.0.1", place.port, KEY)
        call = Call(0, "drop", msgspec.Raw(msgspec.msgpack.encode(())))
        await link.send(call)
        answer = await link.receive()
        assert isinstance(answer, Failure)
        assert "nothing has been opened" in answer.message
        link._sent -= 1  # the same frame once more
        await link.send(call)
        with pytest.raises((EOFError, OSError)):
            await link.receive()
        assert "cut off, for it sent a message without the other end's signature" in caplog.text


async def test_what_is_no_call_of_a_node_is_answered_with_an_error(tmp_path: Path):
    async def asked(link: Link, method: str, *arguments: object) -> str:
        await link.send(Call(0, method, msgspec.Raw(msgspec.msgpack.encode(arguments))))
        answer = await link.receive()
        assert isinstance(answer, Failure)
        return answer.message

    async with serving(tmp_path) as place:
        link = await ask_in("127.0.0.1", place.port, KEY)
        assert await asked(link, "__class__") == "a rollout node has no __class__"
        assert "not what begin takes" in await asked(link, "begin", "one")
        assert "not what open takes" in await asked(link, "open", 1, {"backend": 7}, "job")
        assert "'../job'" in await asked(link, "open", 1, {"backend": "tcp"}, "../job")
        link.close()


async def test_what_the_manager_gives_up_ends_there(tmp_path: Path):
    fleet = Fleet(weights(0), tmp_path / "here", backend="tcp", retries=0, deadlines={"stage_s": 5.0})
    async with serving(tmp_path) as place, fleet_with(remote(place.port, fleet.config), fleet) as replica:
        await fleet.manager.update_weights(0)
        wire = fleet.trainers[0].member._engine._wires.first
        find, stop = wire._listener._find, threading.Event()

        def stuck(source: int, nbytes: int) -> memoryview:
            stop.wait(60)
            return find(source, nbytes)

        wire._listener._find = stuck
        with pytest.raises(SyncAborted, match="stage"):
            await fleet.manager.update_weights(1)
        stop.set()
        wire._listener._find = find
        fleet.set_weights(weights(2))
        await fleet.manager.update_weights(2)  # its thread is free again
        assert_equal(replica.weights, weights(2))


def _hold(_: Connection, host: Host, shm_dir: Path) -> None:
    host.enter()
    asyncio.run(serve(host.address, PORT, KEY, shm_dir))


def _push(_: Connection, host: Host, other: Host, shm_dir: Path) -> None:
    host.enter()

    async def push() -> None:
        fleet = Fleet(weights(0), shm_dir / "here", backend="tcp", delta="off")
        node = RemoteNode(1, (other.address, PORT), KEY, fleet.config, "test-remote")
        async with fleet_with(node, fleet) as replica:
            for version in range(2):
                fleet.set_weights(weights(version))
                await fleet.manager.update_weights(version)
                assert_equal(replica.weights, weights(version))

    asyncio.run(push())


class Deaf:
    """A connection to a host that is gone: from a call on it takes nothing."""

    def __init__(self) -> None:
        self.sent: list[Message] = []
        self.called = asyncio.Event()

    async def send(self, message: Message) -> None:
        self.sent.append(message)
        self.called.set()
        if isinstance(message, Cancel):
            await asyncio.Event().wait()


async def test_giving_up_does_not_wait_for_a_host_that_takes_nothing():
    node, link = remote(1, CheckpointEngineConfig()), Deaf()
    call = asyncio.create_task(node._ask(link, "takes_deltas", ()))  # type: ignore[arg-type]
    await link.called.wait()
    call.cancel()
    async with asyncio.timeout(60):
        with pytest.raises(asyncio.CancelledError):
            await call
        await asyncio.sleep(0)
        assert [type(message) for message in link.sent] == [Call, Cancel]
        await node.close()
    assert not node._telling


def test_nothing_but_a_network_is_needed_between_the_hosts(tmp_path: Path):
    with hosts_or_skip(2) as hosts:
        holding, _ = forked.start(_hold, hosts[1], tmp_path)
        try:
            assert soon(lambda: _listens(hosts[1]) or not holding.is_alive(), 600)
            before = hosts[1].received_nbytes
            pushing, _ = forked.start(_push, hosts[0], hosts[1], tmp_path)
            pushing.join(600)
            assert pushing.exitcode == 0
            moved = 2 * sum(tensor.nbytes for tensor in weights(0).values())
            assert hosts[1].received_nbytes - before > moved
            assert soon(lambda: arenas_in(tmp_path) == [])
        finally:
            holding.kill()
            holding.join()


def _listens(host: Host) -> bool:
    found = subprocess.run(
        ["ip", "netns", "exec", host.namespace, "cat", "/proc/net/tcp"], capture_output=True, text=True, check=True
    )
    return f":{PORT:04X} 00000000:0000 0A" in found.stdout


class TestKey:
    def test_it_is_made_once_and_for_this_user_alone(self, tmp_path: Path):
        file = tmp_path / "key"
        assert make_key(file)
        assert file.stat().st_mode & 0o777 == 0o600
        key = key_in(file)
        assert len(key) >= 32
        assert not make_key(file)
        assert key_in(file) == key

    def test_a_full_disk_leaves_no_half_of_one(self, tmp_path: Path):
        soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (10, hard))
        try:
            with pytest.raises(ConfigError, match="cannot be made: File too large"):
                make_key(tmp_path / "key")
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        assert not (tmp_path / "key").exists()

    def test_one_that_others_may_read_is_refused(self, tmp_path: Path):
        file = tmp_path / "key"
        make_key(file)
        file.chmod(0o640)
        with pytest.raises(ConfigError, match=f"chmod 600 {file}"):
            key_in(file)

    def test_one_that_is_short_or_missing_is_refused(self, tmp_path: Path):
        file = tmp_path / "key"
        with pytest.raises(ConfigError, match="No such file"):
            key_in(file)
        file.touch(0o600)
        file.write_text("secret\n")
        with pytest.raises(ConfigError, match="has 6 characters, fewer than 32"):
            key_in(file)


class TestHosts:
    def hosts(self, tmp_path: Path, *nodes: str) -> Hosts:
        make_key(tmp_path / "key")
        return Hosts(nodes, tmp_path / "key", CheckpointEngineConfig())

    def test_servers_of_a_host_with_a_node_belong_to_it(self, tmp_path: Path):
        hosts = self.hosts(tmp_path, "192.0.2.7:7800", "192.0.2.8:7801")
        assert hosts.index_of("http://192.0.2.8:8000") == 2
        assert [hosts.index_of(f"http://{host}:8000") for host in ("192.0.2.7", "127.0.0.1")] == [1, HERE]

    def test_servers_of_this_host_belong_to_a_process_here_that_is_named(self, tmp_path: Path):
        assert self.hosts(tmp_path, "127.0.0.1:7800").index_of("http://localhost:8000") == 1

    def test_a_server_elsewhere_without_a_node_is_refused_with_the_remedy(self, tmp_path: Path):
        with pytest.raises(ConfigError, match=r"9:8000 is not on this host .* Run `python -m verl"):
            self.hosts(tmp_path, "192.0.2.7:7800").index_of("http://192.0.2.9:8000")

    @pytest.mark.parametrize("node", ["192.0.2.7", "http://192.0.2.7:7800", ":7800", "192.0.2.7:port"])
    def test_what_names_no_place_is_refused(self, tmp_path: Path, node: str):
        with pytest.raises(ConfigError, match="is not host:port"):
            self.hosts(tmp_path, node)

    def test_nodes_without_a_key_are_refused(self):
        with pytest.raises(ConfigError, match="need node_key"):
            Hosts(["192.0.2.7:7800"], None, CheckpointEngineConfig())


def _node(*arguments: str) -> None:
    sys.exit(main(arguments))


class TestCommand:
    def test_bad_input_is_one_line(self, tmp_path: Path):
        for options, said in (
            ([tmp_path / "key", "--port", "70000"], "error: --port must be from 0 to 65535, not 70000\n"),
            ([tmp_path / "no" / "key"], "cannot be made: No such file or directory\n"),
            ([tmp_path / "key", "--host", "192.0.2.1"], "is no address of"),
        ):
            node = forked.run(_node, "--key-file", *map(str, options))
            assert node.returncode == 2
            assert said in node.stderr
            assert node.stderr.count("\n") == 1

    @pytest.mark.job
    def test_it_serves_until_it_is_told_to_end(self, tmp_path: Path):
        command = [sys.executable, "-m", "verl.checkpoint_engine.node", "--key-file", "key", "--host", "127.0.0.1"]
        with subprocess.Popen([*command, "--port", "0"], cwd=tmp_path, stderr=subprocess.PIPE, text=True) as process:
            try:
                said = ""
                while "publishers that have the key" not in said:
                    said += (line := process.stderr.readline())
                    assert line, said
                assert "the key is made: key" in said
                process.send_signal(signal.SIGTERM)
                assert process.wait(300) == 0
                assert "stopped" in process.stderr.read()
            finally:
                process.kill()
