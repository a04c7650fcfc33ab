"""Trainer ranks and a rollout node in processes of their own, which can be told to die, stall or spoil bytes.

The processes are forked by a server that has torch loaded, so that one takes a fraction of a second to start.
"""

from __future__ import annotations

import asyncio
import ctypes
import os
import signal
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks.processes import Member
from tests import forked
from tests.checkpoint_engine.fakes import (
    RecordingReplica,
    RowShardedSource,
    Through,
    arenas_in,
    open_descriptors,
    send_signal,
)
from verl.checkpoint_engine.config import CheckpointEngineConfig
from verl.checkpoint_engine.memory.committed import read_committed
from verl.checkpoint_engine.sync.manager import CheckpointEngineManager
from verl.checkpoint_engine.sync.rollout_node import RolloutNode
from verl.checkpoint_engine.sync.trainer_rank import TrainerRank

TRAINERS = 2
ROWS, COLUMNS = 2**14, 256
"""16 MiB in buckets of 1 MiB: more than sockets hold, so that most of it is still to come when the first has landed."""
BULK_NBYTES = 2**16


def weights(version: int) -> dict[str, torch.Tensor]:
    number = torch.arange(ROWS * COLUMNS, dtype=torch.int32).view(ROWS, COLUMNS)
    w = number + version + (((number * 40503 * version) >> 8) & 0xFF)  # what changes takes a third of a version
    return {"w": w, "norm": w[:1, :9].clone(), "layer": w[:99, :9].clone()}


# --- in the processes -------------------------------------------------------------------------------------------------


class _Member:
    """What a test asks of any process."""

    async def resources(self) -> dict[str, int]:
        return resources()


def resources() -> dict[str, int]:
    """What of this process somebody else could run out of."""
    descriptors = open_descriptors()
    maps = Path("/proc/self/maps").read_text().splitlines()
    return {
        "sockets": sum(target.startswith("socket:") for target in descriptors),
        "descriptors": len(descriptors),
        "slots": sum("slot-" in line for line in maps),
        "threads": len(os.listdir("/proc/self/task")),
    }


class Source(RowShardedSource):
    doom: int | None = None
    """The signal that ends or stops the process in the middle of its next copy."""

    def copy(self, shard: Any, destination: torch.Tensor) -> None:
        if self.doom is not None:
            doom, self.doom = self.doom, None
            signal.raise_signal(doom)
        super().copy(shard, destination)


class Rank(_Member, TrainerRank):
    def __init__(self, index: int, config: CheckpointEngineConfig) -> None:
        self.held = Source(weights(0), index, TRAINERS)
        super().__init__(index, self.held, config)

    async def train(self, version: int) -> None:
        self.held.tensors = weights(version)

    async def fall_in_copy(self, number: int) -> None:
        self.held.doom = number


class Node(_Member, RolloutNode):
    def __init__(self, index: int, config: CheckpointEngineConfig, shm_dir: Path) -> None:
        super().__init__(index, config, job="test", shm_dir=shm_dir)
        self.spoil = Spoil()
        spoil_transfers(self._engine, self.spoil)

    async def on_landing(self, number: int | None, pid: int) -> None:
        """When a few transfers have landed, send signal `number` to `pid`; None: flip a bit of one."""
        self.spoil.arm(number, pid)

    async def in_stage(self, owner: int, number: int, pid: int) -> None:
        """Send signal `number` to `pid`, which is `owner`, when it has done some of its part of the next stage.

        Where nodes ask for what they read it falls before it is asked for the second time: what a node notices to have
        landed may have been all, on a machine that is busy.
        """
        if hasattr(self._engine, "open_wire"):
            self.spoil.arm_before_reading(owner, lambda: send_signal(pid, number))
        else:
            self.spoil.arm(number, pid)


class Spoil:
    """Called with every bulk transfer that has landed, and before every one that a node asks for."""

    LANDINGS = 3
    READINGS = 2

    def __init__(self) -> None:
        self._left = 0
        self._action: Callable[[int], None] = lambda address: None
        self._owner, self._readings_left = 0, 0
        self._before_reading: Callable[[], None] = lambda: None

    def arm(self, number: int | None, pid: int) -> None:
        def flip(address: int) -> None:
            ctypes.c_uint8.from_address(address + 5).value ^= 1

        self.arm_with(flip if number is None else lambda _: send_signal(pid, number))

    def arm_with(self, action: Callable[[int], None]) -> None:
        self._left = self.LANDINGS
        self._action = action

    def arm_before_reading(self, owner: int, action: Callable[[], None]) -> None:
        self._owner, self._readings_left = owner, self.READINGS
        self._before_reading = action

    def landed(self, address: int, nbytes: int) -> None:
        if nbytes < BULK_NBYTES or not self._left:
            return
        self._left -= 1
        if not self._left:
            self._action(address)

    def asks(self, owner: int, nbytes: int) -> None:
        if nbytes < BULK_NBYTES or owner != self._owner or not self._readings_left:
            return
        self._readings_left -= 1
        if not self._readings_left:
            self._before_reading()


def spoil_transfers(engine: Any, spoil: Spoil) -> None:
    """Let `spoil` see what lands in the slot, whatever the backend; `naive` has no transfers on one host."""
    if hasattr(engine, "open_wire"):
        open_wire = engine.open_wire
        engine.open_wire = lambda topology: SpoiledWire(open_wire(topology), spoil)
    elif hasattr(engine, "_groups"):
        engine._groups._communicator = SpoiledCommunicator(engine._groups._communicator, spoil)


class SpoiledWire:
    def __init__(self, wire: Any, spoil: Spoil) -> None:
        self._wire, self._spoil = wire, spoil

    def __getattr__(self, name: str) -> Any:
        return getattr(self._wire, name)

    def read(self, owner: int, source: int, target: int, nbytes: int) -> Any:
        self._spoil.asks(owner, nbytes)
        return self._wire.read(owner, source, target, nbytes), target, nbytes

    def watch(self, owner: int, source: int, target: int, nbytes: int) -> Any:
        return self._wire.watch(owner, source, target, nbytes), target, nbytes

    def is_done(self, transfer: Any) -> bool:
        handle, target, nbytes = transfer
        done = self._wire.is_done(handle)
        if done:
            self._spoil.landed(target, nbytes)
        return done


class SpoiledCommunicator:
    def __init__(self, communicator: Any, spoil: Spoil) -> None:
        self._communicator, self._spoil = communicator, spoil

    def __getattr__(self, name: str) -> Any:
        return getattr(self._communicator, name)

    def broadcast(self, group: Any, memory: torch.Tensor, *, sending: bool) -> Any:
        flight = self._communicator.broadcast(group, memory, sending=sending)
        return flight if sending else SpoiledFlight(flight, memory, self._spoil)


class SpoiledFlight:
    def __init__(self, flight: Any, memory: torch.Tensor, spoil: Spoil) -> None:
        self._flight, self._memory, self._spoil = flight, memory, spoil

    def is_done(self) -> bool:
        done = self._flight.is_done()
        if done:
            self._spoil.landed(self._memory.data_ptr(), len(self._memory))
        return done


def _made(member_class: type, arguments: tuple[Any, ...]) -> object:
    torch.set_num_threads(1)
    return member_class(*arguments)


# --- in the test ------------------------------------------------------------------------------------------------------


class MemberProcess(Member):
    """A port to `member_class(*arguments)` in a process of its own; every method of it can be awaited."""

    leaves_within_s = 5.0

    def __init__(self, name: str, member_class: type, *arguments: Any) -> None:
        forked.start_server()
        super().__init__(name, partial(_made, member_class, arguments))

    @property
    def is_alive(self) -> bool:
        if not self._reader.is_alive():  # the kernel closes the pipe a moment before the process counts as ended
            self._process.join(60)
        return self._process.is_alive()

    def signal(self, number: int) -> None:
        """Returns when a process that is killed is gone, and one that is stopped stands still."""
        send_signal(self.pid, number)
        if number == signal.SIGKILL:
            self._process.join(60)

    async def end(self) -> None:
        await asyncio.to_thread(super().end)


class ProcessFleet:
    """Two trainer ranks and nodes in processes, behind breakable ports; the replica and the manager are here."""

    def __init__(self, config: CheckpointEngineConfig, shm_dir: Path, *, nodes: int = 1) -> None:
        self.config, self.shm_dir = config, shm_dir
        self.trainers = [Through(self._start(f"trainer-{rank}")) for rank in range(TRAINERS)]
        self.nodes = [Through(self._start(f"node-{index}")) for index in range(nodes)]
        self.node = self.nodes[0]
        self.replica = RecordingReplica()
        self.manager = CheckpointEngineManager(config=config, trainers=self.trainers, nodes=self.nodes)

    def _start(self, name: str) -> MemberProcess:
        role, _, index = name.partition("-")
        if role == "trainer":
            return MemberProcess(name, Rank, int(index), self.config)
        return MemberProcess(name, Node, int(index), self.config, self.shm_dir)

    @property
    def _ports(self) -> list[Through]:
        return [*self.trainers, *self.nodes]

    def __getitem__(self, name: str) -> Through:
        (port,) = (port for port in self._ports if port.name == name)
        return port

    def dead(self) -> list[str]:
        return [port.name for port in self._ports if not port.member.is_alive]

    async def replace(self, name: str) -> None:
        """A new process behind the port `name`."""
        await self[name].member.end()
        self[name].member = self._start(name)

    async def __aenter__(self) -> ProcessFleet:
        await self.manager.add_replicas([self.replica])
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.manager.close()
        for port in self._ports:
            await port.member.end()

    async def sync(self, version: int) -> None:
        await asyncio.gather(*(port.member.train(version) for port in self.trainers))
        await self.manager.update_weights(version)

    async def resources(self) -> dict[str, dict[str, int]]:
        return {port.name: await port.member.resources() for port in self._ports}

    def assert_serves(self, version: int, *, arena: bool = True) -> None:
        """The replica has `version`, bit-equal; so has every arena, unless its node was killed."""
        expected = weights(version)
        assert (self.replica.version, self.replica.paused) == (version, False)
        assert all(torch.equal(self.replica.weights[name], tensor) for name, tensor in expected.items())
        if arena:
            assert len(arenas_in(self.shm_dir)) == len(self.nodes)
            for directory in arenas_in(self.shm_dir):
                for name, tensor in read_committed(str(directory), version):
                    assert torch.equal(tensor, expected[name])
