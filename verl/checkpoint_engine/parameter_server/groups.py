"""A ParameterServer's process groups: gloo, nccl or hccl over its own store, without torch's global state."""

from __future__ import annotations

import errno
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch

from ..compat.torch import (
    AllgatherOptions,
    PrefixStore,
    ProcessGroupGloo,
    TCPStore,
)
from ..config import GlooOptions, HcclOptions, NcclOptions
from ..errors import ConfigError, TransportTimeout
from ..links.attempt import Attempt
from ..links.communicators import Gloo, GroupMaker, Hccl, Nccl, post
from ..links.rendezvous import POLL_S, Deadline, failures, listening_store
from ..plan.topology import Lane
from ..support import envs
from ..support.admission import Doorkeeper

MESSAGE_NBYTES = 16 * 2**20
"""Bytes of one gloo broadcast: two at a time are faster than a whole bucket at once."""
IN_FLIGHT = 2
LATER_S = 1.0
"""The library's timeouts are longer than ours by this much, because ours name the late ranks."""
MESSAGE_POLL_S = 0.0002
"""The pause between polls of a message, which takes at least 4 ms."""
LOOK_S = 0.02
"""The pause between checks for other failures during a wait."""


def communicator_for(kind: str) -> GroupMaker:
    """The maker of process groups for devices of `kind`. Raises BackendUnavailable."""
    if kind == "cuda":
        return Nccl(NcclOptions())
    return Hccl(HcclOptions()) if kind == "npu" else Gloo(GlooOptions())


def meeting_place(master: str | None) -> tuple[str, int]:
    """Host and port of `master` (`host:port`), or of `MASTER_ADDR` and `MASTER_PORT`. Raises ConfigError."""
    place = master or envs.master_address()
    host, _, port = place.rpartition(":")
    if not host or not port.isdigit():
        raise ConfigError(
            f"the ranks of a ParameterServer connect to MASTER_ADDR and MASTER_PORT, now {place!r}: set both, "
            "start under torchrun, or pass master='host:port'"
        )
    return host, int(port)


def open_store(rank: int, master: str | None, timeout_s: float, doors: Doorkeeper) -> TCPStore:
    """The store in which all ranks meet, at their `meeting_place`.

    Rank 0 hosts it, unless torchrun does. Raises ConfigError, TransportError.
    """
    host, port = meeting_place(master)
    hosts = rank == 0 and (master is not None or not envs.torchrun_hosts_store())
    with failures(
        f"rank {rank}: {'opening' if hosts else 'connecting to'} the store at {host}:{port}", None, "prepare"
    ):
        listener = _bound(host, port) if hosts else None
        if listener is not None:
            return listening_store(listener, doors, timeout_s, port_is_shared=True)
        timeout = timedelta(seconds=timeout_s)
        return TCPStore(host, port, is_master=hosts, timeout=timeout, wait_for_workers=False, multi_tenant=True)


def _bound(host: str, port: int) -> socket.socket | None:
    """None if the port is taken: perhaps by another store of this process, which torch then uses for this one, too.

    A name may mean another address here than elsewhere; many systems have 127.0.1.1 for their own.
    """
    try:
        family, _, _, _, place = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        if is_inside(str(place[0])) and not is_inside(host):
            place = ("", port)
        return socket.create_server(place[:2], family=family)
    except OSError as exc:
        if isinstance(exc, socket.gaierror) or exc.errno != errno.EADDRINUSE:
            raise RuntimeError(str(exc)) from exc
        return None


def is_inside(host: str) -> bool:
    """Whether `host` is a loopback address, so that all ranks are on one host."""
    return host in ("localhost", "::1") or host.startswith("127.")


@dataclass(frozen=True)
class _Message:
    work: Any
    what: str
    done: Callable[[], None] | None
    """Of the last one of a broadcast."""


class Group:
    """The process group of some ranks, for memory on their device. Used from one thread; waits poll `check`."""

    def __init__(self, group: Any, ranks: Sequence[int], rank: int, session: str, stream: Callable[[], Any]) -> None:
        self.ranks = list(ranks)
        self.session = session
        """The session in which it was made."""
        self._group = group
        self._rank = rank
        self._stream = stream
        self._flying: deque[_Message] = deque()

    @classmethod
    def connect(
        cls,
        communicator: GroupMaker,
        store: TCPStore,
        *,
        rank: int,
        ranks: Sequence[int],
        session: str,
        device: torch.device,
        deadline: Deadline,
        check: Callable[[], None],
    ) -> Group:
        """Make the group; all `ranks` call it with the same new `session`. `check` raises an error to give it up."""
        # A connection of its own: torch keeps a store's connection locked while it waits.
        own = PrefixStore(f"{session}/group", store.clone())  # type: ignore[attr-defined]
        stream = getattr(communicator, "stream", nullcontext)

        def make() -> Group:
            with failures(f"connecting ranks {', '.join(map(str, ranks))}", None, "prepare"):
                lane = Lane(device=None, threads=IN_FLIGHT)
                timeout_s = deadline.timeout_s + LATER_S
                group = communicator.group(own, list(ranks).index(rank), len(ranks), lane, timeout_s)
                return cls(group, ranks, rank, session, stream)

        attempt = Attempt(make)
        while not attempt.done.wait(POLL_S):
            check()
            if deadline.passed:
                who = ", ".join(f"rank {other}" for other in ranks if other != rank)
                raise TransportTimeout(
                    f"no process group with {who} within {deadline.timeout_s:.1f} s", phase="prepare"
                )
        made: Group = attempt.result()
        try:
            made.greet(device, deadline, check)
        except BaseException:
            made.close()
            raise
        return made

    def greet(self, device: torch.device, deadline: Deadline, check: Callable[[], None]) -> None:
        """Make every connection that broadcasts need, because a rank that leaves unconnected keeps others waiting."""
        for root in self.ranks:
            self.broadcast(torch.zeros(1, dtype=torch.uint8, device=device), root, deadline, check)
        self.land(deadline, check)

    def stream(self) -> AbstractContextManager[None]:
        """On devices, a block on the broadcasts' stream: they run after copies on it. Else it does nothing."""
        context: AbstractContextManager[None] = self._stream()
        return context

    def all_gather(
        self, data: bytes, device: torch.device, deadline: Deadline, check: Callable[[], None]
    ) -> list[bytes]:
        """Gather `data`, which is not empty, of every rank, in the order of `ranks`. Collective."""
        parts = [torch.zeros(1, dtype=torch.int64, device=device) for _ in self.ranks]
        with self.stream():
            own = torch.tensor([len(data)], device=device)
            self._all_gather(parts, own, "exchanging sizes", deadline, check)
            longest = max(int(part.item()) for part in parts)
            message = torch.zeros(longest, dtype=torch.uint8)
            message[: len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8)
            received = [torch.zeros(longest, dtype=torch.uint8, device=device) for _ in self.ranks]
            self._all_gather(received, message.to(device), "exchanging metas", deadline, check)
            return [
                bytes(memory[: int(part.item())].cpu().numpy()) for memory, part in zip(received, parts, strict=True)
            ]

    def broadcast(
        self,
        memory: torch.Tensor,
        root: int,
        deadline: Deadline,
        check: Callable[[], None],
        done: Callable[[], None] = lambda: None,
    ) -> None:
        """Begin to broadcast `memory` (uint8, on the device) from rank `root`, after the broadcasts in flight.

        Returns when its last message is in flight. A later call of `broadcast` or `land` calls `done` after all of it
        has arrived; until then the caller must not change `memory`.
        """
        what = f"the broadcast of rank {root}"
        place, timeout = self.ranks.index(root), _timeout(deadline)
        step = MESSAGE_NBYTES if memory.device.type == "cpu" else max(len(memory), 1)
        if not len(memory):
            self.land(deadline, check)
            done()
        with self.stream():
            for start in range(0, len(memory), step):
                if len(self._flying) == IN_FLIGHT:
                    self._land_first(deadline, check)
                with failures(what, None):
                    work = post(self._group, memory[start : start + step], place, timeout)
                self._flying.append(_Message(work, what, done if start + step >= len(memory) else None))

    def land(self, deadline: Deadline, check: Callable[[], None]) -> None:
        """Wait for all broadcasts in flight."""
        with self.stream():
            while self._flying:
                self._land_first(deadline, check)

    def close(self) -> None:
        """Leave the group. Broadcasts in flight keep their memory until they end, at the latest at the deadline.

        gloo waits five times as long for connections that a peer has left half made. Only `greet` makes connections.
        """
        group, self._group = self._group, None
        if group is None:
            return
        flying, self._flying = self._flying, deque()
        if not flying:
            return
        if self._stream is not nullcontext:
            group.abort()  # of nccl and hccl; gloo's does nothing

        works = deque(message.work for message in flying)
        threading.Thread(target=_release, args=([group], works), name="parameter-server-given-up", daemon=True).start()

    def _all_gather(
        self, parts: list[torch.Tensor], own: torch.Tensor, what: str, deadline: Deadline, check: Callable[[], None]
    ) -> None:
        options = AllgatherOptions()
        options.timeout = _timeout(deadline)
        with failures(what, None):
            work = self._group.allgather([parts], [own], options)
        self._flying.append(_Message(work, what, None))
        self.land(deadline, check)

    def _land_first(self, deadline: Deadline, check: Callable[[], None]) -> None:
        message = self._flying[0]
        self._await(message.work, message.what, deadline, check)
        self._flying.popleft()
        if message.done is not None:
            message.done()

    def _await(self, work: Any, what: str, deadline: Deadline, check: Callable[[], None]) -> None:
        with failures(what, None):
            while not work.is_completed():
                check()
                if deadline.passed:
                    raise TransportTimeout(f"{what} not done within {deadline.timeout_s:.1f} s")
                self._pause(work)
            work.wait()  # returns at once; raises what went wrong

    def _pause(self, work: Any) -> None:
        """Until it may be done. Looking often would take processor time from who moves the bytes."""
        if isinstance(self._group, ProcessGroupGloo):
            with suppress(RuntimeError):  # not yet; or it failed, which is found next
                work.wait(timedelta(seconds=LOOK_S))
        else:
            time.sleep(MESSAGE_POLL_S)


def _timeout(deadline: Deadline) -> timedelta:
    """Of one message: what a peer leaves unfinished gloo holds so long, even if the peer's process has ended."""
    return timedelta(seconds=deadline.remaining_s + LATER_S)


def _release(group: list[Any], flying: deque[Any]) -> None:
    """Give the only reference to a group up when nothing is in flight: it does not end before that."""
    while flying:
        if flying[0].is_completed():
            flying.popleft()
        time.sleep(POLL_S)
    group.clear()
