"""`mooncake`: Mooncake's transfer engine over TCP or RDMA. https://github.com/kvcache-ai/Mooncake"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from ..config import CheckpointEngineConfig, MooncakeOptions
from ..errors import TransportError
from ..links.attempt import within
from ..links.network import reached_at
from ..links.rdma import INFINIBAND, list_ib_devices, require_devices
from ..links.wire import UInt8s, Wire
from ..plan.topology import Topology
from ..support.admission import OWN_USER, Admission, Doorkeeper, Unguarded
from .one_sided import OneSidedEngine

os.environ.setdefault("MC_LOG_LEVEL", "ERROR")  # read when the library is loaded; it reports every step otherwise
from mooncake.engine import TransferEngine

from ..compat.mooncake import errors_unlogged  # loads the library, too

logger = logging.getLogger(__name__)

PORT_ATTEMPTS = 4
DONE, FAILED, TIMED_OUT = 1, -1, -2
"""Results of `transfer_check_status`; 0 means "not yet"."""


class MooncakeWire(Wire):
    """One transfer engine. Every transfer is a batch of one read: the library reports the status of the first only."""

    def __init__(
        self,
        *,
        host: str,
        protocol: str,
        devices: str,
        admission: Admission = OWN_USER,
        new_engine: Callable[[], Any] = TransferEngine,
    ) -> None:
        """`admission`: the peers that may connect; they can then read and write all registered memory. `new_engine`
        makes Mooncake's engine, or a stand-in for it. Raises TransportError if the engine cannot start."""
        self.keeps = protocol == "rdma"
        # Mooncake picks ports by trying; two engines that start at once may pick the same.
        for attempt in range(1, PORT_ATTEMPTS + 1):
            self._doors = Doorkeeper(admission)
            with errors_unlogged() if attempt < PORT_ATTEMPTS else nullcontext():  # why the last one fails is told
                problem = self._start(new_engine, host, protocol, devices)
            if problem is None:
                break
            self._doors.close()
        else:
            raise TransportError(
                f"Mooncake cannot start on {host} ({protocol}): {problem} after {PORT_ATTEMPTS} attempts. "
                "It needs a free port from 15000 to 17000",
                phase="prepare",
            )
        self._host = host
        self._targets: dict[int, str] = {}
        self._opened: set[int] = set()
        self._timeout_s: float = 0.0
        self._registered: dict[int, UInt8s] = {}

    def _start(self, new_engine: Callable[[], Any], host: str, protocol: str, devices: str) -> str | None:
        """What went wrong. It listens on all interfaces, whatever it is told (0.3.13)."""
        self._engine: Any = new_engine()
        try:
            with self._doors.guarding():
                status = self._engine.initialize(host, "P2PHANDSHAKE", protocol, devices)
        except Unguarded as exc:
            return str(exc)
        return None if status == 0 else f"error {status}"

    def admit(self, admission: Admission) -> None:
        self._doors.admit(admission)

    def register(self, memory: UInt8s) -> None:
        address = memory.ctypes.data
        status = self._engine.register_memory(address, max(memory.nbytes, 1))
        if status != 0:
            raise TransportError(f"Mooncake cannot register {memory.nbytes} bytes: error {status}")
        self._registered[address] = memory

    def deregister(self, memory: UInt8s) -> None:
        self._engine.unregister_memory(memory.ctypes.data)
        del self._registered[memory.ctypes.data]

    def address(self) -> bytes:
        return f"{self._host}:{self._engine.get_rpc_port()}".encode()

    def connect(self, owner: int, address: bytes, timeout_s: float) -> None:
        self._targets[owner] = address.decode()
        self._timeout_s = timeout_s

    def read(self, owner: int, source: int, target: int, nbytes: int) -> int:
        if owner in self._opened:
            batch = self._submit(self._engine, owner, source, target, nbytes)
        else:  # the first call shakes hands, and waits for a peer that does not answer
            engine = self._engine
            what = f"connecting to {self._targets[owner]}"
            batch = within(self._timeout_s, lambda: self._submit(engine, owner, source, target, nbytes), what)
            self._opened.add(owner)
        if batch in (0, 2**64 - 1):
            raise TransportError(f"{self._targets[owner]} cannot be reached")
        return int(batch)

    def _submit(self, engine: Any, owner: int, source: int, target: int, nbytes: int) -> int:
        return int(engine.batch_transfer_async_read(self._targets[owner], [target], [source], [nbytes]))

    def is_done(self, transfer: int) -> bool:
        status = self._engine.transfer_check_status(transfer)
        if status == TIMED_OUT:
            raise TransportError("Mooncake ended a read at its own time limit")
        if status == FAILED:
            raise TransportError("a read failed: its process is gone or unreachable")
        return bool(status == DONE)

    def close(self) -> None:
        """Free the engine; its threads end then, and with them every read in flight."""
        if self._engine is None:
            return
        for address in self._registered:
            self._engine.unregister_memory(address)
        self._doors.close()
        self._engine = None
        self._registered.clear()


class MooncakeEngine(OneSidedEngine):
    @classmethod
    def check_host(cls, config: CheckpointEngineConfig) -> None:
        options = config.options_of("mooncake", MooncakeOptions)
        reached_at(options.host, options.interface)
        rdma_devices(options, INFINIBAND)

    def open_wire(self, topology: Topology | None) -> MooncakeWire:
        options = self.config.options_of("mooncake", MooncakeOptions)
        return MooncakeWire(
            host=reached_at(options.host, options.interface),
            protocol=options.protocol,
            devices=rdma_devices(options, INFINIBAND),
            admission=self.admission_of(topology),
        )


def rdma_devices(options: MooncakeOptions, present_in: Path) -> str:
    """The devices to use, comma-separated; empty for all. Raises ConfigError listing the devices of this host."""
    if options.protocol != "rdma":
        return ""
    wanted = [name for name in options.rdma_devices.split(",") if name]
    require_devices(wanted, list_ib_devices(present_in), "mooncake", "protocol")
    return ",".join(wanted)
