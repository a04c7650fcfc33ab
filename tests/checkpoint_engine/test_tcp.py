"""The wire `tcp`: who may read what, and what is left of it."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections import Counter
from collections.abc import Iterator

import msgspec
import numpy as np
import psutil
import pytest

from tests.checkpoint_engine.fakes import open_descriptors
from verl.checkpoint_engine.backends.tcp import ANSWER, KEY_NBYTES, REQUEST, Endpoint, TcpWire
from verl.checkpoint_engine.errors import TransportError
from verl.checkpoint_engine.support.admission import Admission

HOST = "127.0.0.1"
DEADLINE_S = 60.0


@pytest.fixture(autouse=True)
def patient_watches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("verl.checkpoint_engine.backends.tcp.WATCHED_S", 60.0)


@pytest.fixture
def owner() -> Iterator[TcpWire]:
    wire = TcpWire(HOST, 4)
    yield wire
    wire.close()


@pytest.fixture
def node() -> Iterator[TcpWire]:
    wire = TcpWire(HOST, 4)
    yield wire
    wire.close()


def wait(wire: TcpWire, transfer: object) -> None:
    end = time.monotonic() + DEADLINE_S
    while not wire.is_done(transfer):
        assert time.monotonic() < end
        time.sleep(0.001)


def connected_to(wire: TcpWire) -> tuple[socket.socket, Endpoint]:
    endpoint = msgspec.json.decode(wire.address(), type=Endpoint)
    return socket.create_connection((HOST, endpoint.local_port), DEADLINE_S), endpoint


def test_overlapping_reads_of_any_size_arrive_in_their_places(owner: TcpWire, node: TcpWire):
    memory, target = np.random.default_rng(0).integers(0, 256, 2**22, np.uint8), np.zeros(2**22, np.uint8)
    owner.register(memory)
    node.connect(0, owner.address(), DEADLINE_S)
    cuts = [0, 1, 8, 4097, 2**20, 2**20 + 3, 2**22]
    parts = zip(cuts, cuts[1:], strict=False)
    reads = [
        node.read(0, memory.ctypes.data + low, target.ctypes.data + low, high - low) for low, high in reversed([*parts])
    ]
    for transfer in reads:
        wait(node, transfer)
    assert np.array_equal(target, memory)


def test_bytes_that_are_not_registered_any_more_are_refused_and_the_connection_serves_on(owner: TcpWire, node: TcpWire):
    gone, memory, target = np.ones(100, np.uint8), np.full(100, 7, np.uint8), np.zeros(100, np.uint8)
    owner.register(gone)
    owner.register(memory)
    owner.deregister(gone)
    node.connect(0, owner.address(), DEADLINE_S)
    for source, nbytes in ((gone.ctypes.data, 100), (memory.ctypes.data + 1, 100), (memory.ctypes.data - 1, 100)):
        with pytest.raises(TransportError, match="has not registered these bytes"):
            wait(node, node.read(0, source, target.ctypes.data, nbytes))
    assert not target.any()
    wait(node, node.read(0, memory.ctypes.data, target.ctypes.data, 100))
    assert (target == 7).all()


@pytest.mark.parametrize("key", [b"", bytes(KEY_NBYTES), b"GET / HTTP/1.1\r\n\r\n" * 4])
def test_who_does_not_know_the_key_gets_no_byte(owner: TcpWire, key: bytes):
    memory = np.full(100, 7, np.uint8)
    owner.register(memory)
    stranger, _ = connected_to(owner)
    with stranger:
        answer = b""
        with contextlib.suppress(OSError):  # it may be gone at any moment
            stranger.sendall(key + REQUEST.pack(memory.ctypes.data, 100, False, 0))
            stranger.shutdown(socket.SHUT_WR)
            answer = stranger.recv(1)
    assert answer == b""


def test_a_request_beyond_the_address_space_is_refused(owner: TcpWire):
    stranger, endpoint = connected_to(owner)
    with stranger:
        stranger.sendall(endpoint.key + REQUEST.pack(2**64 - 1, 2**64 - 1, False, 0))
        assert ANSWER.unpack(stranger.recv(ANSWER.size)) == (0,)


def listening() -> set[tuple[str, int]]:
    """Where this process does."""
    rows = psutil.Process().net_connections("tcp")
    return {tuple(row.laddr) for row in rows if row.status == psutil.CONN_LISTEN}


def listening_at(ports: set[int]) -> set[int]:
    found = [(ip, port) for ip, port in listening() if port in ports]
    assert {ip for ip, _ in found} <= {HOST}
    return {port for _, port in found}


def test_it_listens_inside_its_host_until_members_are_on_others(owner: TcpWire):
    endpoint = msgspec.json.decode(owner.address(), type=Endpoint)
    ports = {endpoint.port, endpoint.local_port}
    assert listening_at(ports) == {endpoint.local_port}
    owner.admit(Admission())
    assert listening_at(ports) == {endpoint.local_port}
    owner.admit(Admission(addresses=("10.0.0.7",)))
    assert listening_at(ports) == ports


def test_a_wire_that_only_reads_listens_nowhere():
    before = listening()
    TcpWire(HOST, 4, listens=False).close()
    wire = TcpWire(HOST, 4, listens=False)
    assert listening() <= before
    wire.close()


def test_a_member_that_ends_fails_the_reads_from_it_and_nobody_listens_there(node: TcpWire):
    owner = TcpWire(HOST, 1)
    address = owner.address()
    node.connect(0, address, DEADLINE_S)
    owner.close()
    target = np.zeros(8, np.uint8)
    with pytest.raises(TransportError, match=HOST):
        wait(node, node.read(0, target.ctypes.data, target.ctypes.data, 8))
    with pytest.raises(TransportError, match="cannot be reached"):
        node.connect(1, address, 1.0)


def test_closing_in_the_middle_of_reads_leaves_no_thread_and_no_socket():
    threads, descriptors = set(threading.enumerate()), Counter(open_descriptors())
    memory, target = np.zeros(2**26, np.uint8), np.zeros(2**26, np.uint8)
    owner, node = TcpWire(HOST, 4), TcpWire(HOST, 4)
    owner.register(memory)
    node.connect(0, owner.address(), DEADLINE_S)
    for _ in range(8):
        node.read(0, memory.ctypes.data, target.ctypes.data, memory.nbytes)
    node.close()
    target[:] = 1
    owner.close()
    assert target.all()
    assert set(threading.enumerate()) <= threads
    assert Counter(open_descriptors()) <= descriptors


def test_a_silent_stranger_does_not_keep_it_from_closing():
    owner = TcpWire(HOST, 4)
    stranger, _ = connected_to(owner)
    with stranger:
        began = time.monotonic()
        owner.close()
        assert time.monotonic() - began < DEADLINE_S / 2


def test_a_watch_is_answered_when_the_bytes_have_changed(owner: TcpWire, node: TcpWire):
    page, copy = np.zeros(100, np.uint8), np.zeros(100, np.uint8)
    owner.register(page)
    node.connect(0, owner.address(), DEADLINE_S)
    watching = node.watch(0, page.ctypes.data, copy.ctypes.data, 100)
    node.wait(0.05)
    assert not node.is_done(watching)
    page[3] = 7
    owner.changed()
    wait(node, watching)
    assert copy[3] == 7


def test_reads_are_answered_while_a_watch_waits(owner: TcpWire, node: TcpWire):
    page, copy = np.zeros(100, np.uint8), np.ones(200, np.uint8)
    copy[:100] = 0
    owner.register(page)
    node.connect(0, owner.address(), DEADLINE_S)
    watching = node.watch(0, page.ctypes.data, copy.ctypes.data, 100)
    wait(node, node.read(0, page.ctypes.data, copy.ctypes.data + 100, 100))
    assert not copy.any()
    assert not node.is_done(watching)


def test_closing_a_wire_ends_who_watches_it(owner: TcpWire, node: TcpWire):
    page, copy = np.zeros(100, np.uint8), np.zeros(100, np.uint8)
    owner.register(page)
    node.connect(0, owner.address(), DEADLINE_S)
    watching = node.watch(0, page.ctypes.data, copy.ctypes.data, 100)
    owner.close()
    with pytest.raises(TransportError, match="failed"):
        wait(node, watching)
        wait(node, node.watch(0, page.ctypes.data, copy.ctypes.data, 100))  # the first may have been answered just so


def test_a_peer_that_opens_to_other_hosts_a_little_later_is_reached(owner: TcpWire):
    endpoint = msgspec.json.decode(owner.address(), type=Endpoint)
    elsewhere = TcpWire("127.0.0.2", 1, listens=False)
    memory, target = np.full(100, 7, np.uint8), np.zeros(100, np.uint8)
    owner.register(memory)
    opening = threading.Timer(0.2, owner.admit, [Admission(addresses=("127.0.0.2",))])
    opening.start()
    try:
        elsewhere.connect(0, msgspec.json.encode(endpoint), DEADLINE_S)
        wait(elsewhere, elsewhere.read(0, memory.ctypes.data, target.ctypes.data, 100))
        assert (target == 7).all()
    finally:
        elsewhere.close()
        opening.join()
