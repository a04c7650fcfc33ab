"""`tcp`: plain sockets, without a package to install. The kernel copies received bytes to their destination.

A member that is read listens on loopback, and on its own address once members are on other hosts. It answers only peers
with the key in its `Member.address`, which travels over the job's control channel. Peers cannot write: a request names
bytes, and an answer is those bytes.
"""

from __future__ import annotations

import ctypes
import hmac
import queue
import secrets
import socket
import struct
import threading
import time
from contextlib import suppress
from dataclasses import dataclass
from typing import Final

import msgspec
import xxhash

from ..config import CheckpointEngineConfig, TcpOptions
from ..errors import TransportError
from ..links.network import LOOPBACK, reached_at
from ..links.wire import UInt8s, Wire
from ..plan.encoded import parsed
from ..plan.topology import Topology
from ..support.admission import Admission
from .one_sided import OneSidedEngine

KEY_NBYTES: Final = 32
REQUEST = struct.Struct("<QQ?Q")
"""Address of the bytes in the answering process, their number, whether this is a watch, and for a watch a digest: the
answer waits until the bytes have another one."""
ANSWER = struct.Struct("<Q")
"""The number of bytes that follow: the requested ones, or 0 if they are not registered."""
BACKLOG = 1024
AGAIN_S = 5.0
"""The deadline of a further connection to a member; a read waits for it."""
REFUSED_S = 0.02
"""The pause before a refused connection is tried again."""
WATCHED_S = 1.0
"""A watch is answered after this time at the latest, because the peer may be gone."""
HANDSHAKE_S = 10.0
"""The deadline for a peer to send the key."""


class Endpoint(msgspec.Struct, frozen=True):
    """The address of a wire, and its key."""

    host: str
    port: int
    """The port on `host`, for members on other hosts."""
    local_port: int
    """The port on the loopback interface, for members on this host."""
    key: bytes


class TcpWire(Wire):
    """Answers the reads of peers, if it `listens`, and reads from each peer over up to `num_connections`."""

    keeps = False  # registering is an entry in a table
    tells = True

    def __init__(self, host: str, num_connections: int, *, listens: bool = True) -> None:
        self._host, self._num_connections = host, num_connections
        self._registered: dict[int, UInt8s] = {}
        self._listener = _Listener(host, self._registered) if listens else None
        self._peers: dict[int, _Peer] = {}
        self._landed = threading.Event()

    def register(self, memory: UInt8s) -> None:
        self._registered[memory.ctypes.data] = memory

    def deregister(self, memory: UInt8s) -> None:
        del self._registered[memory.ctypes.data]

    def admit(self, admission: Admission) -> None:
        if self._listener is not None and admission.addresses:
            self._listener.open_to_other_hosts()

    def address(self) -> bytes:
        assert self._listener is not None  # only those that are read have one
        return msgspec.json.encode(self._listener.endpoint)

    def connect(self, owner: int, address: bytes, timeout_s: float) -> None:
        endpoint = parsed(address, Endpoint, "the address of a tcp wire")
        if (known := self._peers.get(owner)) is not None:
            if known.endpoint == endpoint:
                return
            known.close()
        place = (LOOPBACK, endpoint.local_port) if endpoint.host == self._host else (endpoint.host, endpoint.port)
        self._peers[owner] = _Peer(endpoint, place, self._num_connections, self._landed, timeout_s)

    def read(self, owner: int, source: int, target: int, nbytes: int) -> _Read:
        reading = _Read(source, (ctypes.c_ubyte * nbytes).from_address(target))
        self._peers[owner].begin(reading)
        return reading

    def watch(self, owner: int, source: int, target: int, nbytes: int) -> _Read:
        reading = _Read(source, (ctypes.c_ubyte * nbytes).from_address(target), is_watch=True)
        self._peers[owner].begin(reading)
        return reading

    def changed(self) -> None:
        if self._listener is not None:
            self._listener.changed()

    def wait(self, timeout_s: float) -> None:
        self._landed.wait(timeout_s)
        self._landed.clear()

    def is_done(self, transfer: _Read) -> bool:
        if transfer.failure is not None:
            raise TransportError(transfer.failure)
        return transfer.is_done

    def close(self) -> None:
        if self._listener is not None:
            self._listener.close()
        for peer in self._peers.values():
            peer.close()
        self._peers.clear()
        self._registered.clear()


@dataclass
class _Read:
    source: int
    target: ctypes.Array[ctypes.c_ubyte]
    is_watch: bool = False
    is_done: bool = False
    failure: str | None = None

    def request(self) -> bytes:
        known = digest_of(memoryview(self.target)) if self.is_watch else 0
        return REQUEST.pack(self.source, len(self.target), self.is_watch, known)


class _Peer:
    """One member that is read. Connections are made as reads overlap, up to a number."""

    def __init__(
        self,
        endpoint: Endpoint,
        place: tuple[str, int],
        num_connections: int,
        landed: threading.Event,
        timeout_s: float,
    ) -> None:
        """Raises TransportError if it cannot be reached at `place`. `landed` is set with each answer."""
        self.endpoint = endpoint
        self._place, self._num_connections, self._landed = place, num_connections, landed
        self._connections = [self._connect(timeout_s)]
        self._watching: _Connection | None = None
        """Of its own: answers come in order, and that to a watch may take long."""

    def _connect(self, timeout_s: float) -> _Connection:
        return _Connection(self._place, self.endpoint.key, self._landed, timeout_s)

    def begin(self, reading: _Read) -> None:
        if reading.is_watch:
            if self._watching is None:
                self._watching = self._connect(AGAIN_S)
            self._watching.begin(reading)
            return
        connection = min(self._connections, key=lambda one: one.num_waiting)
        if connection.num_waiting and len(self._connections) < self._num_connections:
            connection = self._connect(AGAIN_S)
            self._connections.append(connection)
        connection.begin(reading)

    def close(self) -> None:
        for connection in self._connections:
            connection.close()
        if self._watching is not None:
            self._watching.close()


class _Connection:
    """Reads that are answered in order, by a thread that puts the bytes in their places."""

    def __init__(self, place: tuple[str, int], key: bytes, landed: threading.Event, timeout_s: float) -> None:
        self._landed = landed
        self._name = f"{place[0]}:{place[1]}"
        try:
            self._socket = _connected(place, timeout_s)
            self._socket.sendall(key)
            self._socket.settimeout(None)
        except OSError as exc:
            raise TransportError(f"{self._name} cannot be reached: {exc}") from exc
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._waiting: queue.SimpleQueue[_Read | None] = queue.SimpleQueue()
        self.num_waiting = 0
        self._thread = threading.Thread(target=self._receive, name=f"weight-sync-{self._name}", daemon=True)
        self._thread.start()

    def begin(self, reading: _Read) -> None:
        self.num_waiting += 1
        self._waiting.put(reading)
        try:
            self._socket.sendall(reading.request())
        except OSError as exc:
            raise TransportError(f"{self._name} is gone: {exc}") from exc

    def _receive(self) -> None:
        header = bytearray(ANSWER.size)
        while (reading := self._waiting.get()) is not None:
            try:
                _receive_into(self._socket, memoryview(header))
                if ANSWER.unpack(header)[0] != len(reading.target):
                    raise ConnectionError("it has not registered these bytes")
                _receive_into(self._socket, memoryview(reading.target).cast("B"))
                reading.is_done = True
            except OSError as exc:
                reading.failure = f"a read of {len(reading.target)} bytes from {self._name} failed: {exc}"
            self.num_waiting -= 1
            self._landed.set()

    def close(self) -> None:
        """Nothing is written to the targets of reads any more."""
        self._waiting.put(None)
        _end(self._socket)
        self._thread.join()
        self._socket.close()


class _Listener:
    """Answers those who have the key, each connection on a thread of its own."""

    def __init__(self, host: str, registered: dict[int, UInt8s]) -> None:
        """`registered` memory is served, by where it begins; inside this host, until it is opened to others."""
        self._registered = registered
        self._lock = threading.Lock()
        self._change = threading.Condition()
        self._threads: dict[socket.socket, threading.Thread] = {}
        """Those that have ended are forgotten when the next one begins."""
        self._accepting: dict[socket.socket, threading.Thread] = {}
        self._closed = False
        self._local, self._outer = _bound(LOOPBACK), _bound(host)
        self.endpoint = Endpoint(host, _port(self._outer), _port(self._local), secrets.token_bytes(KEY_NBYTES))
        self._listen(self._local)

    def open_to_other_hosts(self) -> None:
        """Idempotent."""
        if self._outer not in self._accepting:
            self._listen(self._outer)

    def _listen(self, sock: socket.socket) -> None:
        sock.listen(BACKLOG)
        self._accepting[sock] = threading.Thread(
            target=self._accept, args=(sock,), name="weight-sync-accept", daemon=True
        )
        self._accepting[sock].start()

    def _accept(self, sock: socket.socket) -> None:
        while True:
            try:
                connection, _ = sock.accept()
            except OSError:  # closed
                return
            thread = threading.Thread(target=self._answer, args=(connection,), name="weight-sync-serve", daemon=True)
            with self._lock:
                if self._closed:
                    connection.close()
                    return
                self._threads = {known: of for known, of in self._threads.items() if of.is_alive()}
                thread.start()
                self._threads[connection] = thread

    def _answer(self, connection: socket.socket) -> None:
        key, request = bytearray(KEY_NBYTES), bytearray(REQUEST.size)
        try:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            connection.settimeout(HANDSHAKE_S)
            _receive_into(connection, memoryview(key))
            if not hmac.compare_digest(key, self.endpoint.key):
                return
            connection.settimeout(None)
            while True:
                _receive_into(connection, memoryview(request))
                source, nbytes, is_watch, known = REQUEST.unpack(request)
                wanted = self._find(source, nbytes)
                if is_watch:
                    self._wait_for_change(wanted, known)
                connection.sendall(ANSWER.pack(len(wanted)))
                connection.sendall(wanted)
        except OSError:  # the peer is gone, or this wire is closed
            return
        finally:
            connection.close()

    def _wait_for_change(self, memory: memoryview, known: int) -> None:
        with self._change:
            self._change.wait_for(lambda: self._closed or digest_of(memory) != known, WATCHED_S)

    def changed(self) -> None:
        with self._change:
            self._change.notify_all()

    def _find(self, source: int, nbytes: int) -> memoryview:
        """The bytes, or none."""
        for start, memory in list(self._registered.items()):
            if start <= source and source + nbytes <= start + memory.nbytes:
                return memory.data[source - start : source - start + nbytes]
        return memoryview(b"")

    def close(self) -> None:
        with self._lock:
            self._closed = True
            for connection in self._threads:
                _end(connection)
        self.changed()
        for sock in (self._local, self._outer):
            _end(sock)
            sock.close()
        for thread in (*self._accepting.values(), *self._threads.values()):
            thread.join()


def digest_of(memory: memoryview) -> int:
    return xxhash.xxh3_64_intdigest(memory)


def _receive_into(connection: socket.socket, target: memoryview) -> None:
    """Fill `target`. Raises OSError."""
    while target:
        received = connection.recv_into(target, 0, socket.MSG_WAITALL)
        if received == 0:
            raise ConnectionError("it closed the connection")
        target = target[received:]


def _connected(place: tuple[str, int], timeout_s: float) -> socket.socket:
    """Raises OSError. A peer opens to other hosts when it has learnt of them, perhaps later than this member."""
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            return socket.create_connection(place, max(deadline - time.monotonic(), REFUSED_S))
        except ConnectionRefusedError:
            if time.monotonic() + REFUSED_S > deadline:
                raise
            time.sleep(REFUSED_S)


def _end(connection: socket.socket) -> None:
    """Wake who waits for it."""
    with suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)


def _bound(host: str) -> socket.socket:
    """To a free port of `host`. Raises TransportError."""
    try:
        family, kind, protocol, _, place = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0]
        sock = socket.socket(family, kind, protocol)
        sock.bind(place)
    except OSError as exc:
        raise TransportError(f"cannot listen on {host}: {exc}", phase="prepare") from exc
    return sock


def _port(sock: socket.socket) -> int:
    return int(sock.getsockname()[1])


class TcpEngine(OneSidedEngine):
    @classmethod
    def check_host(cls, config: CheckpointEngineConfig) -> None:
        options = config.options_of("tcp", TcpOptions)
        reached_at(options.host, options.interface)

    def open_wire(self, topology: Topology | None) -> TcpWire:
        options = self.config.options_of("tcp", TcpOptions)
        host = reached_at(options.host, options.interface)
        return TcpWire(host, options.num_connections, listens=topology is None)
