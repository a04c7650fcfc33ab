"""What wires of one-sided backends can do by themselves: large contiguous reads between processes of this machine."""

from __future__ import annotations

import mmap
import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.processes import fresh_processes
from verl.checkpoint_engine.links.wire import UInt8s, Wire
from verl.checkpoint_engine.memory.packed import private_memory
from verl.checkpoint_engine.memory.threads import memory_threads
from verl.checkpoint_engine.support import envs

TRANSFER_NBYTES = 64 * 2**20
IN_FLIGHT = 4


def nixl_wire(name: str) -> Wire:
    from verl.checkpoint_engine.backends.nixl import NixlWire

    if name == "owner":
        return NixlWire(name, tls=None, error_handling="peer", num_workers=1, progress=True)
    return NixlWire(name, tls="sm,self", error_handling="none", num_workers=1, progress=False)


def mooncake_wire(name: str) -> Wire:
    from verl.checkpoint_engine.backends.mooncake import MooncakeWire

    return MooncakeWire(host="127.0.0.1", protocol="tcp", devices="")


def tcp_wire(name: str) -> Wire:
    from verl.checkpoint_engine.backends.tcp import TcpWire

    return TcpWire("127.0.0.1", 4)


WIRES: dict[str, Callable[[str], Wire]] = {"nixl": nixl_wire, "mooncake": mooncake_wire, "tcp": tcp_wire}


class ReadPair:
    """This process and one that owns `nbytes`, both registered once, as the engine does it. Close it."""

    def __init__(self, library: str, nbytes: int) -> None:
        context = fresh_processes()
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_own, args=(theirs, library, nbytes), name=f"raw-{library}", daemon=True)
        self._process.start()
        theirs.close()
        self._slot = _shared_memory(nbytes)
        self._wires = [WIRES[library]("node")]
        if self._wires[0].copies:  # with as many threads as the engine has
            self._wires += [WIRES[library]("node") for _ in range(memory_threads() - 1)]
        address, self._source = self._pipe.recv()
        for wire in self._wires:
            wire.register(self._slot)
            wire.connect(0, address, 30.0)
        self.gbytes_per_s()

    def gbytes_per_s(self) -> float:
        """Of reading all of the memory once, four transfers of 64 MiB in flight."""
        start_s = time.perf_counter()
        starts = range(0, len(self._slot), TRANSFER_NBYTES)
        shares = [list(starts[turn :: len(self._wires)]) for turn in range(len(self._wires))]
        with ThreadPoolExecutor(len(self._wires)) as pool:
            list(pool.map(self._read, self._wires, shares))
        return len(self._slot) / (time.perf_counter() - start_s) / 1e9

    def _read(self, wire: Wire, starts: list[int]) -> None:
        flying: list[Any] = []
        while starts or flying:
            while starts and len(flying) < IN_FLIGHT:
                start = starts.pop(0)
                nbytes = min(TRANSFER_NBYTES, len(self._slot) - start)
                flying.append(wire.read(0, self._source + start, self._slot.ctypes.data + start, nbytes))
            left = [transfer for transfer in flying if not wire.is_done(transfer)]
            if len(left) == len(flying):
                time.sleep(0.0002)
            flying = left

    def close(self) -> None:
        for wire in self._wires:
            wire.close()
        self._pipe.close()
        self._process.join(10)
        if self._process.is_alive():
            self._process.kill()

    def __enter__(self) -> ReadPair:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _own(pipe: Connection, library: str, nbytes: int) -> None:
    memory = private_memory(nbytes)
    memory[:] = 7
    wire = WIRES[library]("owner")
    wire.register(memory)
    pipe.send((wire.address(), memory.ctypes.data))
    try:
        pipe.recv()
    except EOFError:
        wire.close()


def _shared_memory(nbytes: int) -> UInt8s:
    path = Path(envs.shm_dir()) / f"verl-raw-{os.getpid()}"
    with path.open("w+b") as file:
        path.unlink()
        os.posix_fallocate(file.fileno(), 0, nbytes)
        flags = mmap.MAP_SHARED | mmap.MAP_POPULATE
        memory: UInt8s = np.frombuffer(mmap.mmap(file.fileno(), nbytes, flags=flags), np.uint8)
    return memory
