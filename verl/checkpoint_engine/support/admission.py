"""Restrict which peers may connect to listening sockets of libraries that check no password.

Mooncake, UCX, gloo and torch's store answer every peer. So their sockets get a packet filter (socket(7),
SO_ATTACH_FILTER), which connections inherit:

    from another host    only if its address is one of the job's
    from this host       only if the peer process belongs to the same user. A packet does not show that: the filter
                         admits the connection, but drops its data until a thread has found the user in
                         /proc/net/tcp. The peer's kernel sends the data again after 200 ms, once per connection
    otherwise            the filter drops all packets, also the first of a connection

From 2026 on, Linux (5d39580f68e6, also in later releases of older series) lets only CAP_NET_ADMIN attach a filter to a
TCP socket. Without it the thread finds the same peers, and cuts the others off: they may have talked for LOOK_S.
"""

from __future__ import annotations

import contextlib
import ctypes
import ipaddress
import os
import select
import socket
import struct
import threading
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass

SO_ATTACH_FILTER, SO_DETACH_FILTER = 26, 27
MOST_NETWORKS = 400
"""A filter has at most half as many networks: many kernels limit socket options to 20 KiB. More are widened."""
LOOK_S = 0.01
IDLE_LOOK_S = 0.25
"""The pause between checks of connections; a check took 0.03 ms in a process with few files."""
BUSY_S = 2.0
"""The time of frequent checks after a socket begins to listen or a peer connects."""
opening = threading.Lock()
"""A lock held while any code of this process opens listening sockets, so that each caller finds only its own."""

# Classic BPF (linux/filter.h). Of a TCP packet a filter sees the TCP header on; the IP header is before it.
_LD_W, _LD_B, _LD_LEN, _TAX = 0x20, 0x30, 0x80, 0x07
_LSH, _RSH, _AND = 0x64, 0x74, 0x54
_JEQ, _JEQ_X, _RET = 0x15, 0x1D, 0x06
_IP, _ABOUT = 0xFFF00000, 0xFFFFF000
_INTERFACE = _ABOUT + 8
_SOURCE = _IP + 12
_DROP, _PASS = (_RET, 0, 0, 0), (_RET, 0, 0, 0xFFFFFFFF)

Instruction = tuple[int, int, int, int]
End = tuple[str, int]


@dataclass(frozen=True)
class Admission:
    """The peers that may connect to a process."""

    local: bool = True
    """Whether processes of the same user on this host may connect."""
    addresses: tuple[str, ...] = ()
    """IPv4 addresses of other hosts that may connect, or networks (`10.1.0.0/16`)."""


OWN_USER, NOBODY = Admission(), Admission(local=False)
ANY_HOST = Admission(addresses=("0.0.0.0/0",))
"""All hosts; on this one only the same user."""


class Unguarded(RuntimeError):
    """A socket could not be guarded. (OSError is left to the libraries' own failures.)"""


class NotPrivileged(Unguarded):
    """The kernel lets this process attach no filter."""


def program(admission: Admission) -> list[Instruction]:
    """The packet filter: from other hosts those of `admission`; from this one packets without data, or none. It reads
    the index of the loopback interface, over which all local packets arrive; otherwise pure."""
    loopback = socket.if_nametoindex("lo")
    carries_nothing = [
        (_LD_B, 0, 0, 12),  # the length of the TCP header, in words, is in the upper half
        (_RSH, 0, 0, 4),
        (_LSH, 0, 0, 2),
        (_TAX, 0, 0, 0),
        (_LD_LEN, 0, 0, 0),
        (_JEQ_X, 0, 1, 0),
        _PASS,
        _DROP,
    ]
    local = carries_nothing if admission.local else [_DROP]
    others: list[Instruction] = []
    for network in _networks(admission.addresses):
        others += [
            (_LD_W, 0, 0, _SOURCE),
            (_AND, 0, 0, int(network.netmask)),
            (_JEQ, 0, 1, int(network.network_address)),
            _PASS,
        ]
    version_4 = [(_LD_B, 0, 0, _IP), (_RSH, 0, 0, 4), (_JEQ, 1, 0, 4), _DROP]
    return [(_LD_W, 0, 0, _INTERFACE), (_JEQ, 0, len(local), loopback), *local, *version_4, *others, _DROP]


def _networks(addresses: Sequence[str]) -> list[ipaddress.IPv4Network]:
    for length in (32, 24, 16, 8):
        networks = {_widened(address, length) for address in addresses}
        if len(networks) <= MOST_NETWORKS // 2:
            break
    return sorted(networks)


def _widened(address: str, length: int) -> ipaddress.IPv4Network:
    network = ipaddress.IPv4Network(address, strict=False)
    return network.supernet(new_prefix=length) if network.prefixlen > length else network


def attach(sock: socket.socket, filter_: Sequence[Instruction]) -> None:
    """Attach the filter to `sock`. Raises NotPrivileged, and Unguarded if the kernel does not support it."""
    instructions = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *one) for one in filter_))
    try:
        sock.setsockopt(
            socket.SOL_SOCKET,
            SO_ATTACH_FILTER,
            struct.pack("HxxxxxxP", len(filter_), ctypes.addressof(instructions)),
        )
    except PermissionError as exc:
        raise NotPrivileged(str(exc)) from exc
    except OSError as exc:
        raise Unguarded(f"this kernel cannot restrict who connects to a listening socket: {exc}") from exc


def can_filter() -> bool:
    """Whether the kernel lets this process restrict who connects."""
    with socket.socket() as sock:
        try:
            attach(sock, [_PASS])
        except NotPrivileged:
            return False
    return True


@dataclass(frozen=True)
class Connection:
    """A line of /proc/net/tcp or tcp6, for this thread's network namespace."""

    local: End
    remote: End
    state: int
    uid: int
    inode: int
    """0: it has not been accepted, or its process has closed it."""


ESTABLISHED, SYN_RECEIVED, FIN_WAIT_1, TIME_WAIT, LISTENING = 1, 3, 4, 6, 10


def connections(ports: Collection[int]) -> list[Connection]:
    """All connections of this host's or container's network with one of `ports` at either end."""
    wanted = {f"{port:04X}" for port in ports}
    return [_connection(line) for line in _table() if {line[1][-4:], line[2][-4:]} & wanted]


def _table() -> Iterator[list[str]]:
    for name in ("tcp", "tcp6"):
        with contextlib.suppress(FileNotFoundError), open(f"/proc/thread-self/net/{name}", encoding="ascii") as lines:
            next(lines)
            yield from map(str.split, lines)


def _connection(line: Sequence[str]) -> Connection:
    _, local, remote, state, _, _, _, uid, _, inode, *_ = line
    return Connection(_end(local), _end(remote), int(state, 16), int(uid), int(inode))


def _end(text: str) -> End:
    """`0100007F:1F90`: words of the address in the order of this machine's bytes. IPv4 in IPv6 becomes IPv4."""
    address, port = text.split(":")
    words = bytes.fromhex(address)
    packed = b"".join(words[start : start + 4][::-1] for start in range(0, len(words), 4))
    if len(packed) == 16 and packed[:12] == b"\0" * 10 + b"\xff\xff":
        packed = packed[12:]
    return str(ipaddress.ip_address(packed)), int(port, 16)


def sockets_here() -> dict[int, int]:
    """Inode to descriptor of this process's sockets."""
    found = {}
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # closed meanwhile
            target = os.readlink(f"/proc/self/fd/{fd}")
            if target.startswith("socket:["):
                found[int(target[8:-1])] = int(fd)
    return found


def listening_here() -> dict[int, End]:
    """Inode to local end of the listening sockets of this process."""
    here, listening = sockets_here(), f"{LISTENING:02X}"
    rows = (_connection(line) for line in _table() if line[3] == listening)
    return {row.inode: row.local for row in rows if row.inode in here}


def borrowed(inode: int) -> socket.socket | None:
    """A duplicate of this process's socket `inode`; None if it is closed."""
    fd = sockets_here().get(inode)
    if fd is None:
        return None
    try:
        copy = socket.socket(fileno=os.dup(fd))
    except OSError:
        return None
    if os.readlink(f"/proc/self/fd/{copy.fileno()}") == f"socket:[{inode}]":
        return copy
    copy.close()  # the descriptor was closed, and another one has its number
    return None


def _strangers_at(ports: Collection[int]) -> list[Connection]:
    """Who is connected to these ports of this process and is not of the same user on this host. UCX is, to itself."""
    rows, here = connections(ports), sockets_here()
    own = {(row.local, row.remote) for row in rows if row.uid == os.geteuid() and row.inode}
    return [
        row
        for row in rows
        if row.local[1] in ports
        and row.state not in (LISTENING, SYN_RECEIVED, TIME_WAIT)
        and (row.inode == 0 or row.inode in here)
        and (row.remote, row.local) not in own
    ]


class Doorkeeper:
    """Guards listening sockets of this process, as long as they are open. Used by one thread."""

    def __init__(
        self,
        admission: Admission = OWN_USER,
        *,
        attach: Callable[[socket.socket, Sequence[Instruction]], None] = attach,
    ) -> None:
        """`attach`: as the function above, for tests."""
        self._admission = admission
        self._attach = attach
        self._filters = True
        """Whether the kernel drops packets. Otherwise this thread alone shuts peers out."""
        self._knows_hosts = admission != OWN_USER
        """Whether those of other hosts are shut out by this thread. Members may connect before `admit` names them."""
        self._guarded: dict[int, int] = {}
        """Ports by inode."""
        self._judged: set[tuple[End, End, int]] = set()
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._epoll = select.epoll()
        self._epoll.register(self._wake, select.EPOLLIN)
        self._closed = False
        self._thread: threading.Thread | None = None

    @contextlib.contextmanager
    def guarding(self) -> Iterator[None]:
        """Guard the sockets that begin to listen in this block.

        Raises Unguarded if a peer that may not connect did so before the guard: its connection would stay open. The
        caller must then close what the block has made, and try again.
        """
        with opening:
            before = listening_here().keys()
            yield
            for inode in listening_here().keys() - before:
                if (sock := borrowed(inode)) is not None:
                    with sock:
                        self.guard(sock)

    def guard(self, sock: socket.socket) -> None:
        """Guard one socket, best before it listens; otherwise as `guarding`."""
        self._guard(sock)
        if strangers := _strangers_at([sock.getsockname()[1]]):
            raise Unguarded(f"{strangers[0].remote[0]} connected before the socket was guarded")

    def _guard(self, sock: socket.socket) -> None:
        inode, port = os.fstat(sock.fileno()).st_ino, sock.getsockname()[1]
        self._guarded = {known: at for known, at in self._guarded.items() if known in sockets_here()} | {inode: port}
        self._restrict(sock)

    def _restrict(self, sock: socket.socket) -> None:
        try:
            self._attach(sock, program(self._admission))
        except NotPrivileged:
            self._filters = False
        if self._admission.local or not self._filters:
            self._watch(sock)

    def take_over(self, known: Collection[int] = ()) -> None:
        """Guard all listening sockets of this process except the `known` ones (inodes).

        This is for sockets that a library has opened and to which peers have connected. Connections of peers that may
        not connect are cut. Sockets at an IPv6 address are not guarded: filters match IPv4 addresses.
        """
        for inode, (host, _) in listening_here().items():
            address = ipaddress.ip_address(host)
            if inode in known or inode in self._guarded or (address.version == 6 and not address.is_unspecified):
                continue
            if (sock := borrowed(inode)) is not None:
                with sock:
                    self._guard(sock)
        self._judge()

    def admit(self, admission: Admission) -> None:
        """Set the peers that may connect from now on; existing connections stay."""
        self._knows_hosts = True
        if admission == self._admission:
            return
        self._admission = admission
        for inode in self._guarded:
            if (sock := borrowed(inode)) is not None:
                with sock:
                    self._restrict(sock)

    def close(self) -> None:
        """Stop admitting peers of this host. Idempotent."""
        if self._closed:
            return
        self._closed = True
        os.eventfd_write(self._wake, 1)
        if self._thread is not None:
            self._thread.join()
        self._epoll.close()
        os.close(self._wake)

    # ------------------------------------------------------------------ connections of this host

    def _watch(self, sock: socket.socket) -> None:
        """The kernel watches what is behind the descriptor until nobody has it open, also when this one is closed."""
        with contextlib.suppress(FileExistsError):
            self._epoll.register(sock.fileno(), select.EPOLLIN | select.EPOLLET)
        if self._thread is not None:
            os.eventfd_write(self._wake, 1)
        else:
            self._thread = threading.Thread(target=self._run, name="weight-sync-doorkeeper", daemon=True)
            self._thread.start()

    def _run(self) -> None:
        seen: set[int] = set()
        busy_until = time.monotonic() + BUSY_S
        while not self._closed:
            # A connection that its library accepts before this thread runs is no event any more.
            is_busy = time.monotonic() < busy_until or not self._filters
            arrived = self._epoll.poll(LOOK_S if is_busy else IDLE_LOOK_S)
            if any(fd == self._wake for fd, _ in arrived):
                os.eventfd_read(self._wake)
            here = set(sockets_here())
            if arrived or not here <= seen:
                busy_until = time.monotonic() + BUSY_S
                if self._judge():
                    here = set()  # look again
            seen = here

    def _judge(self) -> bool:
        """Let those of the same user in and shut others out; whether some are not accepted yet.

        Of one that has left before it was known nobody can say who it was. What it has sent never arrives, nor does its
        end: a library that reads from it would wait.
        """
        ports = set(self._guarded.values())
        rows = connections(ports)
        other_end = {(row.local, row.remote): row for row in rows if row.inode}
        left = {(row.local, row.remote) for row in rows if not row.inode and row.state == FIN_WAIT_1}
        self._judged &= {(row.local, row.remote, row.inode) for row in rows}
        later = False
        for row in rows:
            known = (row.local, row.remote, row.inode)
            if row.local[1] not in ports or row.state != ESTABLISHED or known in self._judged:
                continue
            peer = other_end.get((row.remote, row.local))
            if peer is None and (row.remote, row.local) not in left:
                # Of another host; or the kernel left it out of the table, which it does not write at one moment.
                is_here = row.remote[0] == row.local[0]
                later = later or is_here
                if is_here or self._filters or not self._knows_hosts:
                    continue
                if self._is_of_the_job(row.remote[0]):
                    self._judged.add(known)
                    continue
            if row.inode == 0 or (sock := borrowed(row.inode)) is None:
                later = True  # it is accepted first, and then gets a descriptor
            else:
                with sock, contextlib.suppress(OSError):  # it was just closed
                    if peer is not None and peer.uid == os.geteuid() and self._admission.local:
                        if self._filters:
                            sock.setsockopt(socket.SOL_SOCKET, SO_DETACH_FILTER, 0)
                    else:
                        sock.shutdown(socket.SHUT_RDWR)
                self._judged.add(known)
        return later

    def _is_of_the_job(self, host: str) -> bool:
        address = ipaddress.ip_address(host)
        return any(address in network for network in _networks(self._admission.addresses))
