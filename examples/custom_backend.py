"""A checkpoint-engine backend that moves weights over TCP: nodes read the pieces of every trainer rank from a socket.

python -m verl.trainer.main_ppo checkpoint_engine.backend=tcp_example \
    checkpoint_engine.custom_backend_module=examples.custom_backend

For reading, not for use: whoever reaches the port gets the weights, and every rank's copy is as large as the model.
"""

from __future__ import annotations

import contextlib
import os
import socket
import struct
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from verl.checkpoint_engine.base import Capabilities, CheckpointEngineWithCache
from verl.checkpoint_engine.config import CheckpointEngineConfig
from verl.checkpoint_engine.errors import TransportError
from verl.checkpoint_engine.memory.arena import NodeArena
from verl.checkpoint_engine.memory.publishing import Publication, SlotPieces, publish
from verl.checkpoint_engine.memory.slot import SlotView
from verl.checkpoint_engine.plan.sync_plan import SyncPlan
from verl.checkpoint_engine.plan.topology import Topology, direct
from verl.checkpoint_engine.plan.types import Member
from verl.checkpoint_engine.ports import WeightSource
from verl.checkpoint_engine.registry import CheckpointEngineRegistry
from verl.utils.config import from_mapping, option

NAME = "tcp_example"
REQUEST = struct.Struct("!q")
"""All that a node says: the version it wants. The answer is the rank's pieces in plan order, and nothing else."""


@dataclass(frozen=True, kw_only=True)
class TcpOptions:
    """`checkpoint_engine.engine_kwargs.tcp_example`"""

    bind: str = option("127.0.0.1", "address to listen on; 0.0.0.0 lets other hosts in")


@CheckpointEngineRegistry.register(NAME)
class TcpEngine(CheckpointEngineWithCache):
    options_class = TcpOptions
    capabilities = Capabilities(one_sided=False, same_host=False, device_types=("cpu", "cuda", "npu"))

    def __init__(self, *, member: Member, config: CheckpointEngineConfig) -> None:
        super().__init__(member=member, config=config)
        self._options = from_mapping(TcpOptions, config.engine_kwargs.get(NAME, {}), f"engine_kwargs.{NAME}")
        self._plan: SyncPlan | None = None
        self._senders: tuple[Member, ...] = ()
        self._listener: socket.socket | None = None
        self._copy: SlotView | None = None
        self._published: int | None = None

    def prepare(self, plan: SyncPlan, arena: NodeArena | None) -> str:
        """A trainer rank makes a private copy of its pieces' memory and listens; a node has its arena already."""
        self.finalize()
        self._plan = plan
        if arena is not None:
            return ""  # stands for the arena's directory
        fd = os.memfd_create(NAME)  # has no name in the file system, so nothing is left behind
        os.ftruncate(fd, max(plan.layout.nbytes, 1))
        self._copy = SlotView(Path(f"/proc/self/fd/{fd}"), plan.layout, writable=True)
        os.close(fd)
        self._listener = socket.create_server((self._options.bind, 0))
        threading.Thread(target=self._serve, args=(self._listener,), name="tcp-example", daemon=True).start()
        host = self.member.host if self._options.bind == "0.0.0.0" else self._options.bind
        return f"{host}:{self._listener.getsockname()[1]}"

    @classmethod
    def build_topology(cls, trainers: Sequence[Member], nodes: Sequence[Member]) -> Topology:
        return direct(trainers, nodes)

    def init_process_group(self, topology: Topology) -> None:
        self._senders = topology.trainers

    def send_weights(self, version: int, source: WeightSource, slots: Mapping[str, str]) -> Publication:
        """Publish into the private copy; `slots` is empty, as nodes may be on other hosts."""
        assert self._plan is not None and self._copy is not None  # the manager prepares every member first
        self._published = None
        publication = publish(source, SlotPieces(self._copy, self._plan, self.member.index))
        self._published = version
        return publication

    def receive_weights(self, version: int, arena: NodeArena) -> int:
        """Fetch into the slot that the manager has opened, one rank after the other."""
        slot = SlotView(arena.slot_view().path, arena.layout, writable=True)
        try:
            return sum(self._fetch(sender, version, slot) for sender in self._senders)
        finally:
            slot.close()

    def finalize(self) -> None:
        if self._listener is not None:
            with contextlib.suppress(OSError):  # wakes the thread that waits in accept()
                self._listener.shutdown(socket.SHUT_RDWR)
            self._listener.close()
            self._listener = None
        if self._copy is not None:
            self._copy.close()
            self._copy = None

    def _serve(self, listener: socket.socket) -> None:
        with contextlib.suppress(OSError):  # the listener was closed
            while True:
                connection, _ = listener.accept()
                threading.Thread(target=self._answer, args=(connection,), daemon=True).start()

    def _answer(self, connection: socket.socket) -> None:
        """One request. A wrong version, like any failure, closes the connection: the node sees it end too soon."""
        with contextlib.suppress(OSError, struct.error), connection:
            connection.settimeout(self.config.deadlines.stage_s)
            (wanted,) = REQUEST.unpack(connection.recv(REQUEST.size, socket.MSG_WAITALL))
            if wanted == self._published and self._copy is not None:
                for run in self._runs(self.member.index, self._copy):
                    connection.sendall(run)

    def _fetch(self, sender: Member, version: int, slot: SlotView) -> int:
        host, _, port = sender.address.rpartition(":")
        moved = 0
        try:
            with socket.create_connection((host, int(port)), timeout=self.config.deadlines.stage_s) as connection:
                connection.sendall(REQUEST.pack(version))
                for run in self._runs(sender.index, slot):
                    received = 0
                    while received < len(run):
                        count = connection.recv_into(run[received:])
                        if not count:
                            raise ConnectionError("the connection ended too soon")
                        received += count
                    moved += received
        except OSError as exc:
            raise TransportError(
                f"reading version {version} from {sender.name} at {sender.address} failed after {moved} B: {exc}",
                version=version,
                phase="stage",
                member=self.member.name,
            ) from exc
        return moved

    def _runs(self, owner: int, region: SlotView) -> list[memoryview]:
        """The contiguous runs of bytes that `owner` sends, in plan order, as parts of `region`."""
        assert self._plan is not None
        memory = memoryview(region.bytes.numpy())
        return [
            memory[offset + row * stride : offset + row * stride + nbytes]
            for offset, nbytes, rows, stride in self._plan.extents.of(self._plan.pieces_of(owner))
            for row in range(rows)
        ]
