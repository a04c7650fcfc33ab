"""A checkpoint-engine backend from a wire: rollout nodes copy out of the memory of trainer ranks on the same host.

python -m verl.trainer.main_ppo checkpoint_engine.backend=process_memory \
    checkpoint_engine.custom_backend_module=examples.custom_wire

The kernel copies from process to process: process_vm_readv(2). It lets a process read those of its own user, where
kernel.yama.ptrace_scope is 0, or root's.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Sequence
from dataclasses import dataclass

from verl.checkpoint_engine.backends.one_sided import OneSidedEngine
from verl.checkpoint_engine.errors import BackendUnavailable, TransportError
from verl.checkpoint_engine.links.wire import UInt8s, Wire
from verl.checkpoint_engine.plan.topology import Topology, direct
from verl.checkpoint_engine.plan.types import Member
from verl.checkpoint_engine.registry import CheckpointEngineRegistry
from verl.utils.config import from_mapping, option

libc = ctypes.CDLL(None, use_errno=True)


class Span(ctypes.Structure):
    """`struct iovec`"""

    _fields_ = (("base", ctypes.c_void_p), ("nbytes", ctypes.c_size_t))


class ProcessMemoryWire(Wire):
    """A read is one call to the kernel, over when it returns."""

    copies = True  # by the thread that reads, so several of them share a version, each with a wire of its own

    def __init__(self, step_nbytes: int) -> None:
        self._step_nbytes = step_nbytes
        self._processes: dict[int, int] = {}
        self._kept: dict[int, UInt8s] = {}

    def register(self, memory: UInt8s) -> None:
        self._kept[memory.ctypes.data] = memory

    def deregister(self, memory: UInt8s) -> None:
        del self._kept[memory.ctypes.data]

    def address(self) -> bytes:
        return str(os.getpid()).encode()

    def connect(self, owner: int, address: bytes, timeout_s: float) -> None:
        self._processes[owner] = int(address)

    def read(self, owner: int, source: int, target: int, nbytes: int) -> int:
        copied = 0
        while copied < nbytes:
            here = Span(target + copied, min(nbytes - copied, self._step_nbytes))
            there = Span(source + copied, here.nbytes)
            process = self._processes[owner]
            count = libc.process_vm_readv(process, ctypes.byref(here), 1, ctypes.byref(there), 1, ctypes.c_ulong(0))
            if count <= 0:
                reason = os.strerror(ctypes.get_errno())
                raise TransportError(f"the memory of process {process} cannot be read: {reason}")
            copied += count
        return copied

    def is_done(self, transfer: int) -> bool:
        return True

    def close(self) -> None:
        self._kept.clear()


@dataclass(frozen=True, kw_only=True)
class ProcessMemoryOptions:
    """`checkpoint_engine.engine_kwargs.process_memory`"""

    step_megabytes: int = option(64, "most bytes that one call to the kernel copies, in MiB", least=1)


@CheckpointEngineRegistry.register("process_memory")
class ProcessMemoryEngine(OneSidedEngine):
    options_class = ProcessMemoryOptions

    @classmethod
    def build_topology(cls, trainers: Sequence[Member], nodes: Sequence[Member]) -> Topology:
        if hosts := {member.host for member in (*trainers, *nodes)} - {trainers[0].host}:
            raise BackendUnavailable(f"process_memory is for one host, and members are on {', '.join(hosts)}, too")
        return direct(trainers, nodes)

    def open_wire(self, topology: Topology | None) -> ProcessMemoryWire:
        given = self.config.engine_kwargs.get("process_memory", {})
        options = from_mapping(ProcessMemoryOptions, given, "checkpoint_engine.engine_kwargs.process_memory")
        return ProcessMemoryWire(options.step_megabytes << 20)
