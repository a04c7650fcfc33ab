"""What libraries and links can do by themselves: memcpy, gloo, the wires of one-sided backends, one TCP connection.

All but the last are contexts of a function that moves the bytes once more and returns GB/s.
"""

from __future__ import annotations

import mmap
import os
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch._C._distributed_c10d import BroadcastOptions, PrefixStore, ProcessGroupGloo, Store, TCPStore, Work

from benchmarks.machine import Memcpy
from benchmarks.namespaces import Host
from benchmarks.processes import members
from verl.checkpoint_engine.links.wire import UInt8s, Wire
from verl.checkpoint_engine.memory.packed import private_memory
from verl.checkpoint_engine.memory.threads import memory_threads
from verl.checkpoint_engine.support import envs

TIMEOUT = timedelta(seconds=120)
TRANSFER_NBYTES = 64 * 2**20
"""Of a bucket, and of a read."""
BROADCASTS, READS = 2, 4
"""In flight."""
PORT = 29000
"""For TCP. Nobody else is on that host."""
CHUNK_NBYTES = 2**20
Speed = Callable[[], float]


@contextmanager
def memcpy(nbytes: int) -> Iterator[Speed]:
    """On one thread."""
    with closing(Memcpy(nbytes, 1)) as copies:
        yield copies.gbytes_per_s


# --- gloo -------------------------------------------------------------------------------------------------------------


@contextmanager
def gloo(nbytes: int) -> Iterator[Speed]:
    """Broadcasts between two processes of this machine, timed at the receiver from before the first byte."""
    store = TCPStore("127.0.0.1", 0, is_master=True, timeout=TIMEOUT, wait_for_workers=False)
    with members({f"raw-gloo-{rank}": partial(_GlooEnd, rank, store.port, nbytes) for rank in range(2)}) as ends:

        def gbytes_per_s() -> float:
            sent, received = [end.submit("broadcast") for end in ends]
            sent.result()
            rate: float = received.result()
            return rate

        yield gbytes_per_s


class _GlooEnd:
    def __init__(self, rank: int, port: int, nbytes: int) -> None:
        torch.set_num_threads(1)
        store = TCPStore("127.0.0.1", port, is_master=False, timeout=TIMEOUT, wait_for_workers=False)
        self._group = group_of_two(PrefixStore("raw", store), rank)
        self._buffer = torch.full((nbytes,), 1 + rank, dtype=torch.uint8)

    def broadcast(self) -> float:
        broadcast(self._group, self._buffer[:1]).wait()
        start_s = time.perf_counter()
        flying: list[Work] = []
        for bucket in torch.split(self._buffer, TRANSFER_NBYTES):
            if len(flying) == BROADCASTS:
                flying.pop(0).wait()
            flying.append(broadcast(self._group, bucket))
        for work in flying:
            work.wait()
        return len(self._buffer) / (time.perf_counter() - start_s) / 1e9


def group_of_two(store: Store, rank: int) -> Any:
    """A gloo group over the loopback device; returns when the other of the two has called it, too."""
    group: Any = ProcessGroupGloo
    options = group._Options()
    options._devices = [group.create_device(hostname="127.0.0.1")]
    options._timeout = TIMEOUT
    return group(store, rank, 2, options)


def broadcast(group: Any, memory: torch.Tensor) -> Work:
    options = BroadcastOptions()
    options.rootRank = options.rootTensor = 0
    work: Work = group.broadcast([memory], options)
    return work


# --- one-sided wires --------------------------------------------------------------------------------------------------


def _nixl(name: str) -> Wire:
    from verl.checkpoint_engine.backends.nixl import NixlWire

    if name == "owner":
        return NixlWire(name, tls=None, error_handling="peer", num_workers=1, progress=True)
    return NixlWire(name, tls="sm,self", error_handling="none", num_workers=1, progress=False)


def _mooncake(name: str) -> Wire:
    from verl.checkpoint_engine.backends.mooncake import MooncakeWire

    return MooncakeWire(host="127.0.0.1", protocol="tcp", devices="")


def _tcp(name: str) -> Wire:
    from verl.checkpoint_engine.backends.tcp import TcpWire

    return TcpWire("127.0.0.1", 4)


_WIRES: dict[str, Callable[[str], Wire]] = {"nixl": _nixl, "mooncake": _mooncake, "tcp": _tcp}


@contextmanager
def reads(library: str, nbytes: int) -> Iterator[Speed]:
    """Of all of another process's memory, registered once, as the engine does it."""
    with members({f"raw-{library}": partial(_Owner, library, nbytes)}) as (owner,):
        slot = _shared_memory(nbytes)
        wires = [_WIRES[library]("node")]
        if wires[0].copies:  # with as many threads as the engine has
            wires += [_WIRES[library]("node") for _ in range(memory_threads() - 1)]
        address, source = owner.call("place")
        for wire in wires:
            wire.register(slot)
            wire.connect(0, address, 30.0)

        def gbytes_per_s() -> float:
            start_s = time.perf_counter()
            starts = range(0, nbytes, TRANSFER_NBYTES)
            shares = [list(starts[turn :: len(wires)]) for turn in range(len(wires))]
            with ThreadPoolExecutor(len(wires)) as pool:
                list(pool.map(lambda wire, share: _read(wire, source, slot, share), wires, shares))
            return nbytes / (time.perf_counter() - start_s) / 1e9

        try:
            gbytes_per_s()
            yield gbytes_per_s
        finally:
            for wire in wires:
                wire.close()


def _read(wire: Wire, source: int, slot: UInt8s, starts: Sequence[int]) -> None:
    waiting, flying = list(starts), list[Any]()
    while waiting or flying:
        while waiting and len(flying) < READS:
            start = waiting.pop(0)
            nbytes = min(TRANSFER_NBYTES, len(slot) - start)
            flying.append(wire.read(0, source + start, slot.ctypes.data + start, nbytes))
        left = [transfer for transfer in flying if not wire.is_done(transfer)]
        if len(left) == len(flying):
            time.sleep(0.0002)
        flying = left


class _Owner:
    def __init__(self, library: str, nbytes: int) -> None:
        self._memory = private_memory(nbytes)
        self._memory[:] = 7
        self._wire = _WIRES[library]("owner")
        self._wire.register(self._memory)

    def place(self) -> tuple[bytes, int]:
        return self._wire.address(), self._memory.ctypes.data


def _shared_memory(nbytes: int) -> UInt8s:
    path = Path(envs.shm_dir()) / f"verl-raw-{os.getpid()}"
    with path.open("w+b") as file:
        path.unlink()
        os.posix_fallocate(file.fileno(), 0, nbytes)
        flags = mmap.MAP_SHARED | mmap.MAP_POPULATE
        memory: UInt8s = np.frombuffer(mmap.mmap(file.fileno(), nbytes, flags=flags), np.uint8)
    return memory


# --- the network between two hosts ------------------------------------------------------------------------------------


def tcp_gbit_per_s(sender: Host, receiver: Host, nbytes: int) -> float:
    """Of `nbytes` over one plain connection, timed at the receiver from the first bytes to the last."""
    ends: dict[str, Callable[[], object]] = {
        "tcp-receiver": partial(_Receiver, receiver.address),
        "tcp-sender": _Sender,
    }
    with members(ends, [receiver, sender]) as (there, here):
        there.call("listens")
        sending = here.submit("send", receiver.address, nbytes)
        seconds: float = there.call("receive", nbytes)
        sending.result()
    return 8 * nbytes / seconds / 1e9


class _Receiver:
    def __init__(self, address: str) -> None:
        self._server = socket.create_server((address, PORT))
        self._server.settimeout(TIMEOUT.total_seconds())

    def listens(self) -> None:
        """Answered once it does."""

    def receive(self, nbytes: int) -> float:
        connection, _ = self._server.accept()
        buffer = memoryview(bytearray(CHUNK_NBYTES))
        with connection:
            connection.settimeout(TIMEOUT.total_seconds())
            left = nbytes - connection.recv_into(buffer[: min(nbytes, len(buffer))])
            start_s = time.perf_counter()
            while left:
                received = connection.recv_into(buffer[: min(left, len(buffer))])
                if not received:
                    raise ConnectionError(f"{left} bytes have not come")
                left -= received
        return time.perf_counter() - start_s


class _Sender:
    def send(self, address: str, nbytes: int) -> None:
        buffer = memoryview(bytearray(CHUNK_NBYTES))
        with socket.create_connection((address, PORT), TIMEOUT.total_seconds()) as connection:
            left = nbytes
            while left:
                left -= connection.send(buffer[: min(left, len(buffer))])
