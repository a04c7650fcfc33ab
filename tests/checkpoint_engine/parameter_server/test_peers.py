"""Reads from peers' memory: bit-equal, bounded in time, and harmless when they fail."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator

import pytest
import torch

from tests.checkpoint_engine.member_processes import MemberProcess
from verl.checkpoint_engine.backends.mooncake import MooncakeWire
from verl.checkpoint_engine.errors import TransportError, TransportTimeout
from verl.checkpoint_engine.parameter_server.peers import MAX_IN_FLIGHT, MAX_READ_NBYTES, PeerReader
from verl.checkpoint_engine.parameter_server.records import RankMetas

NBYTES = 4 * 2**20
NEVER = threading.Event()


def new_wire() -> MooncakeWire:
    return MooncakeWire(host="127.0.0.1", protocol="tcp", devices="")


def owner_at(address: str) -> RankMetas:
    return RankMetas(rank=0, host="here", device_id="cpu-0", rdma_device="cpu-0", p2p_address=address, buffers=())


@pytest.fixture(scope="module")
def reader() -> Iterator[PeerReader]:
    """Closing one takes a second."""
    made = PeerReader(new_wire)
    yield made
    made.close()


@pytest.fixture(scope="module")
def own_wire() -> Iterator[MooncakeWire]:
    """With which this process serves."""
    made = new_wire()
    yield made
    made.close()


class Serving:
    """In a process of its own: `NBYTES` of memory."""

    def __init__(self, seed: int) -> None:
        self._memory = torch.arange(NBYTES // 8, dtype=torch.int64) * seed
        self._wire = new_wire()
        self._wire.register(self._memory.view(torch.uint8).numpy())

    def place(self) -> tuple[str, int]:
        return self._wire.address().decode(), self._memory.data_ptr()


class Peer(MemberProcess):
    def __init__(self, seed: int = 3) -> None:
        super().__init__(f"peer-{seed}", Serving, seed)
        self.address, self.memory = self.call("place")
        self.held = torch.arange(NBYTES // 8) * seed

    def read(
        self, reader: PeerReader, target: torch.Tensor, timeout_s: float = 30.0, stop: threading.Event = NEVER
    ) -> None:
        reader.read(owner_at(self.address), self.memory, target.view(torch.uint8), timeout_s, stop)


@pytest.fixture(scope="module")
def peer() -> Iterator[Peer]:
    made = Peer()
    yield made
    made.signal(signal.SIGKILL)


@pytest.fixture
def target() -> torch.Tensor:
    return torch.zeros(NBYTES // 8, dtype=torch.int64)


@pytest.mark.parametrize("nbytes", [0, 1, MAX_READ_NBYTES, (MAX_IN_FLIGHT + 1) * MAX_READ_NBYTES // 2 + 333])
def test_what_is_read_is_what_is_there(reader: PeerReader, own_wire: MooncakeWire, nbytes: int):
    held = torch.randint(0, 255, (nbytes + 64,), dtype=torch.uint8)
    landing = torch.zeros(nbytes + 64, dtype=torch.uint8)
    own_wire.register(held.numpy())
    with reader.into([landing]):
        owner = owner_at(own_wire.address().decode())
        reader.read(owner, held.data_ptr() + 33, landing[:nbytes], 30.0, NEVER)
    own_wire.deregister(held.numpy())
    assert torch.equal(landing[:nbytes], held[33 : nbytes + 33])
    assert not landing[nbytes:].any()


def test_a_peer_that_was_killed_is_named_and_others_can_be_read(reader: PeerReader, peer: Peer, target: torch.Tensor):
    killed = Peer(seed=5)
    with reader.into([target.view(torch.uint8)]):
        killed.read(reader, target)
        assert torch.equal(target, killed.held)
        killed.signal(signal.SIGKILL)
        with pytest.raises(TransportError, match=f"reading from the P2P store at {killed.address}"):
            killed.read(reader, target, timeout_s=3600.0)
    with reader.into([target.view(torch.uint8)]):
        peer.read(reader, target)
    assert torch.equal(target, peer.held)


def test_a_peer_that_stalls_is_named_at_the_deadline_and_writes_nothing_later(
    reader: PeerReader, own_wire: MooncakeWire, peer: Peer, target: torch.Tensor
):
    served = own_wire.address()
    with reader.into([target.view(torch.uint8)]):
        peer.read(reader, target)
        peer.signal(signal.SIGSTOP)
        message = rf"\[stage\] {NBYTES} bytes have not come: the P2P store at {peer.address}, within 1.0 s"
        with pytest.raises(TransportTimeout, match=message):
            peer.read(reader, target, timeout_s=1.0)
    target.zero_()
    peer.signal(signal.SIGCONT)
    # Who serves beside the reader has kept its address, and the next read finds the peer again.
    test_what_is_read_is_what_is_there(reader, own_wire, 64)
    assert own_wire.address() == served
    assert not target.any()
    with reader.into([target.view(torch.uint8)]):
        peer.read(reader, target)
    assert torch.equal(target, peer.held)


def test_a_read_can_be_given_up_from_another_thread(reader: PeerReader, peer: Peer, target: torch.Tensor):
    stop = threading.Event()
    with reader.into([target.view(torch.uint8)]):
        peer.read(reader, target)
        peer.signal(signal.SIGSTOP)
        threading.Timer(0.3, stop.set).start()
        with pytest.raises(TransportError, match=f"P2P store at {peer.address}: given up"):
            peer.read(reader, target, 60.0, stop)
    peer.signal(signal.SIGCONT)
