"""`tcp`: plain sockets, and nothing to install. The kernel copies received bytes to where they belong.

A member that is read listens inside its host, and on its own address once members are on others. It answers only who
knows the key in its `Member.address`, which travels over the job's control channel. Peers cannot write: a request names
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
from contextlib import suppress
from dataclasses import dataclass
from typing import Final

import msgspec

from verl.checkpoint_engine.backends.addresses import reached_at
from verl.checkpoint_engine.backends.one_sided import OneSidedEngine
from verl.checkpoint_engine.backends.wires import UInt8s, Wire
from verl.checkpoint_engine.config import CheckpointEngineConfig, TcpOptions
from verl.checkpoint_engine.encoded import parsed
from verl.checkpoint_engine.errors import TransportError
from verl.checkpoint_engine.topology import Topology
from verl.utils import config as strict
from verl.utils.admission import Admission

KEY_NBYTES: Final = 32
REQUEST = struct.Struct("<QQ")
"""Where the bytes begin in the process that is asked, and how many there are."""
ANSWER = struct.Struct("<Q")
"""How many bytes follow: those that were asked for, or none if they are not registered."""
BACKLOG = 1024
AGAIN_S = 5.0
"""How long a further connection may take to a member that has been reached: a read begins with it."""
HANDSHAKE_S = 10.0
"""Who has not shown the key by then is nobody of this job."""


LOOPBACK = "127.0.0.1"


class Endpoint(msgspec.Struct, frozen=True):
    """Where a wire is reached, and the key to it."""

    host: str
    port: int
    """On `host`, for members on other hosts."""
    local_port: int
    """On the loopback interface, for those on this one."""
    key: bytes


class TcpWire(Wire):
    """Answers peers that read, if it `listens`, and reads from peers over several connections to each."""

    keeps = False  # registering is an entry in a table

    def __init__(self, host: str, num_connections: int, *, listens: bool = True) -> None:
        self._host, self._num_connections = host, num_connections
        self._registered: dict[int, UInt8s] = {}
        self._listener = _Listener(host, self._registered) if listens else None
        self._peers: dict[int, _Peer] = {}

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
        self._peers[owner] = _Peer(endpoint, place, self._num_connections, timeout_s)

    def read(self, owner: int, source: int, target: int, nbytes: int) -> _Read:
        reading = _Read(source, (ctypes.c_ubyte * nbytes).from_address(target))
        self._peers[owner].begin(reading)
        return reading

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
    is_done: bool = False
    failure: str | None = None


class _Peer:
    """One member that is read. Connections are made as reads overlap, up to a number."""

    def __init__(self, endpoint: Endpoint, place: tuple[str, int], num_connections: int, timeout_s: float) -> None:
        """Raises TransportError if it cannot be reached at `place`."""
        self.endpoint = endpoint
        self._place, self._num_connections = place, num_connections
        self._connections = [_Connection(place, endpoint.key, timeout_s)]

    def begin(self, reading: _Read) -> None:
        connection = min(self._connections, key=lambda one: one.num_waiting)
        if connection.num_waiting and len(self._connections) < self._num_connections:
            connection = _Connection(self._place, self.endpoint.key, AGAIN_S)
            self._connections.append(connection)
        connection.begin(reading)

    def close(self) -> None:
        for connection in self._connections:
            connection.close()


class _Connection:
    """Reads that are answered in order, by a thread that puts the bytes in their places."""

    def __init__(self, place: tuple[str, int], key: bytes, timeout_s: float) -> None:
        self._name = f"{place[0]}:{place[1]}"
        try:
            self._socket = socket.create_connection(place, timeout_s)
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
            self._socket.sendall(REQUEST.pack(reading.source, len(reading.target)))
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
        self._threads: dict[socket.socket, threading.Thread] = {}
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
                self._threads[connection] = thread
                thread.start()

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
                wanted = self._find(*REQUEST.unpack(request))
                connection.sendall(ANSWER.pack(len(wanted)))
                connection.sendall(wanted)
        except OSError:  # the peer is gone, or this wire is closed
            return
        finally:
            with self._lock:
                self._threads.pop(connection, None)
            connection.close()

    def _find(self, source: int, nbytes: int) -> memoryview:
        """The bytes, or none."""
        for start, memory in list(self._registered.items()):
            if start <= source and source + nbytes <= start + memory.nbytes:
                return memory.data[source - start : source - start + nbytes]
        return memoryview(b"")

    def close(self) -> None:
        with self._lock:
            self._closed = True
            threads = dict(self._threads)
            for connection in threads:
                _end(connection)
        for sock in (self._local, self._outer):
            _end(sock)
            sock.close()
        for thread in (*self._accepting.values(), *threads.values()):
            thread.join()


def _receive_into(connection: socket.socket, target: memoryview) -> None:
    """Fill `target`. Raises OSError."""
    while target:
        received = connection.recv_into(target, 0, socket.MSG_WAITALL)
        if received == 0:
            raise ConnectionError("it closed the connection")
        target = target[received:]


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
        options = _options_of(config)
        reached_at(options.host, options.interface)

    def open_wire(self, topology: Topology | None) -> TcpWire:
        options = _options_of(self.config)
        host = reached_at(options.host, options.interface)
        return TcpWire(host, options.num_connections, listens=topology is None)


def _options_of(config: CheckpointEngineConfig) -> TcpOptions:
    given = config.engine_kwargs.get("tcp", {})
    return strict.from_mapping(TcpOptions, given, "checkpoint_engine.engine_kwargs.tcp")
