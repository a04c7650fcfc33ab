"""`nixl`: NVIDIA's NIXL over UCX. https://github.com/ai-dynamo/nixl

On one host UCX copies directly from the other process's memory (CMA). That is faster with `sm,self` and without peer
error handling than with UCX's own choice; reads notice a dead process either way. The thread that posts a read copies,
so several threads share a stage, each with its own agent. A network card needs one thread only.

Over plain TCP, UCX emulates reads: the owner answers, and UCX (of nixl 1.5.1) may abort the owner's process if the node
dies meanwhile. Between hosts without RDMA, prefer `tcp`.
"""

from __future__ import annotations

import logging
import secrets
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import nixl

from ..config import CheckpointEngineConfig, NixlOptions
from ..errors import ConfigError, TransportError
from ..links import ucx
from ..links.wire import UInt8s, Wire
from ..plan.topology import Topology
from ..support import envs
from ..support.admission import OWN_USER, Admission, Doorkeeper
from ..support.locality import own_gpu
from .one_sided import OneSidedEngine

ONE_HOST = "sm,self"
PEER_ERRORS = "peer"
NO_ERRORS = "none"
PROGRESS_DELAY_US = 100_000
"""The longest sleep of an owner's progress thread. Traffic wakes it at once; this covers events without traffic. With
1 ms an owner woke 900 times a second and took 4 % of a core from the copies of its host."""

_nixl_errors: tuple[type[Exception], ...] = (
    RuntimeError,
    *(value for value in vars(nixl).values() if isinstance(value, type) and issubclass(value, Exception)),
)


@dataclass(slots=True)
class _Read:
    handle: Any
    is_done: bool = True


class NixlWire(Wire):
    """One NIXL agent with its UCX backend.

    It keeps the handle of each read, 0.7 KB, because every version is read between the same addresses.
    """

    def __init__(
        self,
        name: str,
        *,
        tls: str | None,
        net_devices: str | None = None,
        error_handling: str,
        num_workers: int,
        progress: bool,
        admission: Admission = OWN_USER,
    ) -> None:
        """`progress`: start a thread that answers peers; owners need it, nodes drive their own reads. `admission`: the
        peers that may connect over TCP; they can then read and write all memory of this process."""
        logging.getLogger(nixl.__name__).setLevel(logging.WARNING)  # it reports every agent on standard output
        logging.getLogger(nixl.nixl_agent.__module__).setLevel(logging.WARNING)
        options = {"ucx_error_handling_mode": error_handling, "num_workers": str(num_workers)}
        self._doors = Doorkeeper(admission)
        try:
            with ucx.environment(tls, net_devices), self._doors.guarding():
                self._agent: Any = _new_agent(f"{name}-{secrets.token_hex(4)}", progress)
                self._agent.create_backend("UCX", options)
        except _nixl_errors as exc:  # Unguarded is a RuntimeError, too
            self._doors.close()
            used = ucx.asked_for(tls, net_devices) | options
            raise TransportError(f"NIXL cannot start UCX ({used}): {exc}") from exc
        self._peers: dict[int, str] = {}
        self._registered: dict[int, tuple[UInt8s, Any]] = {}
        self._reads: dict[tuple[int, int, int, int], _Read] = {}
        """By owner, source, target and bytes: those under way, and those that may come again."""
        self.copies = _is_shared_memory(tls)

    def admit(self, admission: Admission) -> None:
        self._doors.admit(admission)

    def register(self, memory: UInt8s) -> None:
        address = memory.ctypes.data
        with _mapped(f"registering {memory.nbytes} bytes"):
            registration = self._agent.register_memory([(address, max(memory.nbytes, 1), 0, "")], "DRAM")
        self._registered[address] = (memory, registration)

    def deregister(self, memory: UInt8s) -> None:
        places = range(memory.ctypes.data, memory.ctypes.data + max(memory.nbytes, 1))
        self._forget(lambda owner, target: target in places)
        with _mapped(f"deregistering {memory.nbytes} bytes"):
            self._agent.deregister_memory(self._registered.pop(memory.ctypes.data)[1])

    def address(self) -> bytes:
        with _mapped("describing the agent"):
            return bytes(self._agent.get_agent_metadata())

    def connect(self, owner: int, address: bytes, timeout_s: float) -> None:
        self._forget(lambda other, target: other == owner)
        with _mapped("connecting"):
            peer = self._agent.add_remote_agent(address)
            self._peers[owner] = peer.decode() if isinstance(peer, bytes) else peer

    def read(self, owner: int, source: int, target: int, nbytes: int) -> _Read:
        key = owner, source, target, nbytes
        try:
            reading = self._reads.get(key) or self._new_read(*key)
            state = self._agent.transfer(reading.handle)
        except _nixl_errors as exc:
            raise TransportError(f"reading {nbytes} bytes failed: {exc}") from exc
        if state == "ERR":
            raise TransportError(f"reading {nbytes} bytes was refused")
        reading.is_done = state == "DONE"
        return reading

    def _new_read(self, owner: int, source: int, target: int, nbytes: int) -> _Read:
        agent = self._agent
        here = agent.get_xfer_descs([(target, nbytes, 0)], "DRAM")
        there = agent.get_xfer_descs([(source, nbytes, 0)], "DRAM")
        reading = _Read(agent.initialize_xfer("READ", here, there, self._peers[owner]))
        self._reads[owner, source, target, nbytes] = reading
        return reading

    def is_done(self, transfer: _Read) -> bool:
        if not transfer.is_done:
            with _mapped("reading"):
                state = self._agent.check_xfer_state(transfer.handle)
            if state == "ERR":
                raise TransportError("reading failed")
            transfer.is_done = state == "DONE"
        return transfer.is_done

    def _forget(self, belongs: Callable[[int, int], bool]) -> None:
        """Release the reads for which `belongs(owner, target)` is true: their addresses are no longer valid."""
        for key in [key for key in self._reads if belongs(key[0], key[2])]:
            self._reads.pop(key).handle.release()

    def is_idle(self) -> bool:
        """Whether no read is in flight: UCX over TCP (nixl 1.5.1) aborts an owner that answers a closed connection."""
        return not any(self._is_under_way(reading) for reading in self._reads.values())

    def _is_under_way(self, reading: _Read) -> bool:
        try:
            return not reading.is_done and bool(self._agent.check_xfer_state(reading.handle) == "PROC")
        except _nixl_errors:
            return False

    def close(self) -> None:
        """Close the agent and its endpoints, and with them all reads in flight: UCX cannot cancel a single one."""
        if self._agent is None:
            return
        self._doors.close()
        agent, self._agent = self._agent, None
        for reading in self._reads.values():
            _try(reading.handle.release)
        self._reads.clear()  # handles keep the agent alive
        for peer in self._peers.values():
            _try(agent.remove_remote_agent, peer)
        for _, registration in self._registered.values():
            _try(agent.deregister_memory, registration)
        del agent
        self._registered.clear()


class NixlEngine(OneSidedEngine):
    @classmethod
    def check_host(cls, config: CheckpointEngineConfig) -> None:
        """Start UCX once with the transports and devices that are set, if any: only UCX knows whether they exist."""
        options = config.options_of("nixl", NixlOptions)
        asked_for = ucx.asked_for(options.ucx_tls, options.ucx_net_devices)
        if not asked_for:
            return
        error_handling = _error_handling(options, asked_for.get(ucx.TLS))
        complaints = ucx.complaints(options.ucx_tls, options.ucx_net_devices, error_handling)
        if complaints:
            used = asked_for | {"error_handling": error_handling}
            raise ConfigError(
                f"checkpoint_engine.engine_kwargs.nixl: UCX on {socket.gethostname()} cannot use "
                f"{', '.join(f'{name}={value}' for name, value in used.items())}: {'; '.join(complaints)}"
            )

    def open_wire(self, topology: Topology | None) -> NixlWire:
        options = self.config.options_of("nixl", NixlOptions)
        tls = ucx.asked_for(options.ucx_tls, options.ucx_net_devices).get(ucx.TLS)
        if tls is None and topology and all(trainer.host == self.member.host for trainer in topology.trainers):
            tls = ONE_HOST
        return NixlWire(
            self.member.name,
            tls=tls,
            net_devices=self._net_devices(options),
            error_handling=_error_handling(options, tls),
            num_workers=options.num_workers,
            progress=topology is None,
            admission=self.admission_of(topology),
        )

    def _net_devices(self, options: NixlOptions) -> str | None:
        """Nodes serve several GPUs and keep all devices."""
        if options.ucx_net_devices is None and self.member.role == "trainer":
            return ucx.near_devices(self.member.name, own_gpu(), envs.place_on_host()[1])
        return options.ucx_net_devices

    def admission_of(self, topology: Topology | None) -> Admission:
        """Nodes admit all members' hosts: over TCP an owner may answer on a connection of its own."""
        return Admission(addresses=topology.host_addresses) if topology else OWN_USER

    def num_readers(self, wire: Wire) -> int:
        return self.config.options_of("nixl", NixlOptions).num_threads or super().num_readers(wire)


def _error_handling(options: NixlOptions, tls: str | None) -> str:
    return options.error_handling or (NO_ERRORS if _is_shared_memory(tls) else PEER_ERRORS)


def _new_agent(name: str, progress: bool) -> Any:
    """An agent whose progress thread sleeps until there is something to answer.

    The thread of the Python interface's own agents polls without a pause (nixl 1.5.1): a core for every trainer rank,
    as long as it trains. The delay, which is what they poll by since
    https://github.com/ai-dynamo/nixl/pull/347, is an option of the agent underneath, so that one is replaced.
    """
    agent = nixl.nixl_agent(name, nixl.nixl_agent_config(enable_prog_thread=progress, backends=[]))
    options = nixl.nixlAgentConfig()
    options.useProgThread = progress
    options.pthrDelay = PROGRESS_DELAY_US
    agent.agent = nixl.nixlAgent(name, options)
    return agent


def _is_shared_memory(tls: str | None) -> bool:
    """Such transports of UCX's cannot detect the death of a peer by themselves and refuse to promise it."""
    return tls is not None and set(tls.split(",")) <= {"sm", "self", "cma", "posix", "sysv", "memory", "shm"}


@contextmanager
def _mapped(what: str) -> Iterator[None]:
    try:
        yield
    except _nixl_errors as exc:
        raise TransportError(f"{what} failed: {exc}") from exc


def _try(call: Any, *arguments: Any) -> None:
    """While closing, what cannot be undone goes with the agent."""
    try:
        call(*arguments)
    except _nixl_errors as exc:
        logging.getLogger(__name__).debug("while closing: %s", exc)
