"""The store at which members of a collective meet, and the entries by which each knows that the others are alive."""

from __future__ import annotations

import ipaddress
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import timedelta

from ..compat.torch import PrefixStore, Store, TCPStore
from ..errors import CheckpointEngineError, TransportError, TransportTimeout
from ..support.admission import Doorkeeper, opening
from .network import LOOPBACK

POLL_S = 0.001
"""The pause between polls: a bucket takes ten times as long, and the next one is under way meanwhile."""
PULSE_S = 0.2
PORT_ATTEMPTS = 16
QUIET_S = 5 * PULSE_S
"""When a deadline has passed, the error names members without a sign of life for this long."""


class MeetingPlace:
    """The port of a torch store. The store has no password, so only the members' hosts may connect.

    The port is bound before the host knows whether all members are on it; `open` then listens at one address.
    """

    def __init__(self, host: str) -> None:
        """`host`: the address at which other hosts reach this one. Raises OSError."""
        self._sockets: dict[str, socket.socket] = {}
        for left in reversed(range(PORT_ATTEMPTS)):
            try:
                self.port = self._bind(host, 0)
                if host != LOOPBACK:
                    self._bind(LOOPBACK, self.port)
                break
            except OSError:
                self.close()
                if not left:
                    raise

    def _bind(self, host: str, port: int) -> int:
        sock = self._sockets[host] = socket.socket()
        sock.bind((host, port))
        taken: int = sock.getsockname()[1]
        return taken

    def open(self, host: str, doors: Doorkeeper, timeout_s: float) -> TCPStore:
        """Listen at `host` alone: the address of the constructor, or `LOOPBACK`. Call it once."""
        sock = self._sockets.pop(host)
        self.close()
        return listening_store(sock, doors, timeout_s)

    def close(self) -> None:
        for sock in self._sockets.values():
            sock.close()
        self._sockets.clear()


def listening_store(
    sock: socket.socket, doors: Doorkeeper, timeout_s: float, *, port_is_shared: bool = False
) -> TCPStore:
    """A store that listens at `sock`, a bound socket that it owns from now on. By default torch's listens everywhere.

    `port_is_shared`: further stores that this process opens at the port share this one.
    """
    host, port, *_ = sock.getsockname()
    if ipaddress.ip_address(host).is_unspecified:
        host = LOOPBACK  # to connect to
    with opening:
        doors.guard(sock)
        return TCPStore(
            host,
            port,
            is_master=True,
            timeout=timedelta(seconds=timeout_s),
            wait_for_workers=False,
            multi_tenant=port_is_shared,
            master_listen_fd=sock.detach(),
        )


class Members:
    """The liveness of a collective's members: if one stops, each of the others would blame its own neighbour.

    During a stage a thread of every member keeps changing its entry in the store, and watches the others' entries. Only
    that thread uses the store, because it hangs if the store's host does.
    """

    def __init__(self, name: str, names: Sequence[str]) -> None:
        self._name, self._names = name, list(names)
        self._seen: dict[str, tuple[bytes, float]] = {}
        """Each member's last entry, and the time at which it changed."""
        self._answered = time.monotonic()
        self._stage = 0
        self.store: Store

    def join(self, server: TCPStore | None, address: str, deadline: Deadline, stop: threading.Event) -> None:
        """Connect to the store and wait until every member has. Raises TransportTimeout naming the absent ones."""
        place, _, epoch = address.partition("/")
        host, _, port = place.rpartition(":")
        timeout = timedelta(seconds=deadline.timeout_s)
        store = server or TCPStore(host, int(port), is_master=False, timeout=timeout, wait_for_workers=False)
        self.store = PrefixStore(epoch, store)
        self.store.set(self._name, "here")
        while True:
            for name in self._names:
                if name not in self._seen and self.store.check([name]):
                    self._seen[name] = (b"here", time.monotonic())
            self._answered = time.monotonic()
            if len(self._seen) == len(self._names):
                return
            if stop.is_set() or deadline.passed:
                raise self.not_connected(deadline)
            time.sleep(POLL_S)

    def not_connected(self, deadline: Deadline) -> TransportTimeout:
        absent = [name for name in self._names if name not in self._seen]
        if time.monotonic() - self._answered > QUIET_S:
            absent = self._names[:1]
        who = ", ".join(absent) or "the groups"
        here = ", ".join(name for name in self._names if name in self._seen) or "none"
        return TransportTimeout(f"{who} not connected within {deadline.timeout_s:.1f} s; done: {here}", phase="prepare")

    @contextmanager
    def taking_part(self) -> Iterator[None]:
        left = threading.Event()
        self._stage += 1
        self._answered = began = time.monotonic()
        self._seen = {name: (entry, began) for name, (entry, _) in self._seen.items()}
        threading.Thread(target=self._pulse, args=(left, self._stage), name="weight-sync-pulse", daemon=True).start()
        try:
            yield
        finally:
            left.set()

    def _pulse(self, left: threading.Event, stage: int) -> None:
        # Once the store is gone, so is trainer-0: `missing` will say that nothing was heard.
        with suppress(RuntimeError):
            while not left.wait(PULSE_S):
                self.store.set(self._name, str(time.monotonic()))
                entries = self.store.multi_get(self._names)
                now = time.monotonic()
                for name, entry in zip(self._names, entries, strict=True):
                    if self._seen[name][0] != entry:
                        self._seen[name] = (entry, now)
                self._answered = now
            self.store.set(self._name, f"left {stage}")

    def missing(self) -> str:
        """Names the silent members, for messages: `; no sign of life from node-1`. Empty if all are alive."""
        now = time.monotonic()
        left = f"left {self._stage}".encode()
        quiet = [name for name, (entry, at) in self._seen.items() if entry != left and now - at > QUIET_S]
        if now - self._answered > QUIET_S:
            quiet = self._names[:1]
        return f"; no sign of life from {', '.join(quiet)}" if quiet else ""


@dataclass
class Deadline:
    timeout_s: float
    _end: float = field(init=False)

    def __post_init__(self) -> None:
        self._end = time.monotonic() + self.timeout_s

    @property
    def remaining_s(self) -> float:
        return max(self._end - time.monotonic(), 0.0)

    @property
    def passed(self) -> bool:
        return time.monotonic() >= self._end


@contextmanager
def failures(what: str, version: int | None, phase: str = "stage") -> Iterator[None]:
    """In this block, a RuntimeError of torch becomes a TransportError that names `what` was under way."""
    try:
        yield
    except CheckpointEngineError:
        raise
    except RuntimeError as exc:
        raise TransportError(f"{what} failed: {exc}", version=version, phase=phase) from exc
