"""Reads between P2P stores: bit-equal, bounded in time, and harmless when they fail."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections.abc import Iterator
from multiprocessing.connection import Connection

import pytest
import torch

from tests.checkpoint_engine.fakes import send_signal
from verl.checkpoint_engine.errors import ConfigError, TransportError, TransportTimeout
from verl.checkpoint_engine.parameter_server.p2p_store import MAX_READ_NBYTES, P2PStore

NBYTES = 4 * 2**20


@pytest.fixture(scope="module")
def stores() -> Iterator[tuple[P2PStore, P2PStore]]:
    """Closing one takes a second."""
    made = P2PStore("cpu-0", host="127.0.0.1"), P2PStore("cpu-1", host="127.0.0.1")
    yield made
    for store in made:
        store.close()


@pytest.fixture
def pair(stores: tuple[P2PStore, P2PStore]) -> Iterator[tuple[P2PStore, P2PStore]]:
    yield stores
    for store in stores:
        store.unregister_named_tensors(list(store._tensors))


def serve(pipe: Connection, seed: int) -> None:
    """A peer in a process of its own: `NBYTES` of memory, until the pipe closes."""
    torch.set_num_threads(1)
    memory = torch.arange(NBYTES // 8, dtype=torch.int64) * seed
    store = P2PStore("peer", host="127.0.0.1")
    store.register_named_tensors({"memory": memory})
    pipe.send((store.address, memory.data_ptr()))
    try:
        pipe.recv()
    except EOFError:
        os._exit(0)


class Peer:
    def __init__(self, seed: int = 3) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["torch"])
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=serve, args=(theirs, seed), daemon=True)
        self._process.start()
        theirs.close()
        self.address, self.memory = self._pipe.recv()

    def send_signal(self, number: int) -> None:
        assert self._process.pid is not None
        send_signal(self._process.pid, number)

    def close(self) -> None:
        self._process.kill()
        self._process.join()
        self._pipe.close()


@pytest.fixture(scope="module")
def peer() -> Iterator[Peer]:
    made = Peer()
    yield made
    made.close()


def test_a_batch_of_reads_lands_where_it_belongs(pair: tuple[P2PStore, P2PStore]):
    owner, reader = pair
    held = torch.randint(0, 255, (3 * MAX_READ_NBYTES // 2,), dtype=torch.uint8)
    other = torch.randn(333, dtype=torch.float64)
    target = torch.zeros(len(held) + other.nbytes, dtype=torch.uint8)
    owner.register_named_tensors({"held": held, "other": other})
    reader.register_named_tensors({"target": target})
    cut = 12345
    reader.batch_transfer_sync_read(
        owner.address,
        [held.data_ptr() + cut, other.data_ptr(), held.data_ptr()],
        [target.data_ptr() + cut, target.data_ptr() + len(held), target.data_ptr()],
        [len(held) - cut, other.nbytes, cut],
        30.0,
    )
    assert torch.equal(target[: len(held)], held)
    assert torch.equal(target[len(held) :].clone().view(torch.float64), other)


def test_many_small_reads_are_one_batch(pair: tuple[P2PStore, P2PStore]):
    owner, reader = pair
    held, target = torch.arange(4000, dtype=torch.int32), torch.zeros(4000, dtype=torch.int32)
    owner.register_named_tensors({"held": held})
    reader.register_named_tensors({"target": target})
    rows = range(500)
    sources = [held.data_ptr() + 32 * row for row in rows]
    targets = [target.data_ptr() + 32 * (499 - row) for row in rows]
    reader.batch_transfer_sync_read(owner.address, sources, targets, [32] * 500, 30.0)
    assert torch.equal(target.view(500, 8), held.view(500, 8).flip(0))


def test_a_store_is_named_after_the_accelerator_with_tcp(pair: tuple[P2PStore, P2PStore]):
    assert [store.device for store in pair] == ["cpu-0", "cpu-1"]
    host, _, port = pair[0].address.rpartition(":")
    assert host == "127.0.0.1"
    assert int(port) > 0


def test_names_are_registered_once_and_only_known_ones_are_let_go(pair: tuple[P2PStore, P2PStore]):
    store, _ = pair
    tensor = torch.zeros(8, 8)
    store.register_named_tensors({"w": tensor})
    with pytest.raises(ConfigError, match="'w' already"):
        store.register_named_tensors({"w": tensor})
    with pytest.raises(ConfigError, match="'t' is not contiguous"):
        store.register_named_tensors({"t": tensor.t()[:3]})
    with pytest.raises(ConfigError, match="not registered with the P2P store: v; registered: w"):
        store.unregister_named_tensors(["w", "v"])
    store.unregister_named_tensors(["w"])
    store.register_named_tensors({"w": tensor})


def test_a_target_outside_of_registered_memory_is_refused(pair: tuple[P2PStore, P2PStore]):
    owner, reader = pair
    held, target = torch.zeros(100, dtype=torch.uint8), torch.zeros(100, dtype=torch.uint8)
    owner.register_named_tensors({"held": held})
    reader.register_named_tensors({"target": target})
    for start in (-1, 1):
        with pytest.raises(ConfigError, match="in no tensor registered"):
            reader.batch_transfer_sync_read(owner.address, [held.data_ptr()], [target.data_ptr() + start], [100], 5.0)


def test_a_protocol_that_does_not_exist_is_refused():
    with pytest.raises(ConfigError, match="tcp or rdma, not 'udp'"):
        P2PStore(None, protocol="udp")


def test_a_closed_store_says_so():
    store = P2PStore(None, host="127.0.0.1")
    store.close()
    store.close()
    with pytest.raises(TransportError, match="is closed"):
        store.batch_transfer_sync_read("127.0.0.1:1", [], [], [], 1.0)


def test_a_peer_that_was_killed_is_named_and_others_can_be_read(pair: tuple[P2PStore, P2PStore]):
    other, reader = pair
    peer = Peer()
    target = torch.zeros(NBYTES // 8, dtype=torch.int64)
    reader.register_named_tensors({"target": target})
    reader.batch_transfer_sync_read(peer.address, [peer.memory], [target.data_ptr()], [NBYTES], 30.0)
    assert torch.equal(target, torch.arange(NBYTES // 8) * 3)
    peer.close()
    with pytest.raises(TransportError, match=f"reading from the P2P store at {peer.address}"):
        reader.batch_transfer_sync_read(peer.address, [peer.memory], [target.data_ptr()], [NBYTES], 3600.0)
    held = torch.ones_like(target)
    other.register_named_tensors({"held": held})
    reader.batch_transfer_sync_read(other.address, [held.data_ptr()], [target.data_ptr()], [NBYTES], 30.0)
    assert torch.equal(target, held)


def test_a_peer_that_stalls_is_named_at_the_deadline_and_writes_nothing_later(
    pair: tuple[P2PStore, P2PStore], peer: Peer
):
    other, reader = pair
    target = torch.zeros(NBYTES // 8, dtype=torch.int64)
    reader.register_named_tensors({"target": target})
    reader.batch_transfer_sync_read(peer.address, [peer.memory], [target.data_ptr()], [NBYTES], 30.0)
    peer.send_signal(signal.SIGSTOP)
    with pytest.raises(TransportTimeout, match=rf"{NBYTES} bytes have not come: .*{peer.address}, within 1.0 s"):
        reader.batch_transfer_sync_read(peer.address, [peer.memory], [target.data_ptr()], [NBYTES], 1.0)
    target.zero_()
    peer.send_signal(signal.SIGCONT)
    # What is served from this store has kept its address, and the next read finds the peer again.
    other.register_named_tensors({"copy": (copy := torch.zeros(8, dtype=torch.int64))})
    other.batch_transfer_sync_read(reader.address, [target.data_ptr()], [copy.data_ptr()], [64], 30.0)
    assert not target.any()
    reader.batch_transfer_sync_read(peer.address, [peer.memory], [target.data_ptr()], [NBYTES], 30.0)
    assert torch.equal(target, torch.arange(NBYTES // 8) * 3)


def test_a_read_can_be_given_up_from_another_thread(pair: tuple[P2PStore, P2PStore], peer: Peer):
    _, reader = pair
    target = torch.zeros(NBYTES, dtype=torch.uint8)
    reader.register_named_tensors({"target": target})
    reader.batch_transfer_sync_read(peer.address, [peer.memory], [target.data_ptr()], [NBYTES], 30.0)
    peer.send_signal(signal.SIGSTOP)
    stop = threading.Event()
    threading.Timer(0.3, stop.set).start()
    with pytest.raises(TransportError, match="given up"):
        reader.batch_transfer_sync_read(peer.address, [peer.memory], [target.data_ptr()], [NBYTES], 60.0, stop)
