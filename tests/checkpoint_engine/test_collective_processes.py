"""Broadcasts between processes of which one is killed, or stopped, while bytes are under way."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from tests.checkpoint_engine.fakes import arenas_in
from tests.checkpoint_engine.test_processes import QUICK_S, Processes
from verl.checkpoint_engine.config import CheckpointEngineConfig
from verl.checkpoint_engine.errors import SyncAborted, TransportError, TransportTimeout

ROWS = 2**18
"""32 MiB: far more than sockets hold, so that a receiver that stops is felt by the sender."""


def config_of(stage_s: float) -> CheckpointEngineConfig:
    return CheckpointEngineConfig.from_mapping(
        {"backend": "gloo", "retries": 0, "update_weights_bucket_megabytes": 1, "deadlines": {"stage_s": stage_s}}
    )


class Stops:
    """Stops the process of a member the moment it is asked for its part in staging; `run` when it has."""

    def __init__(self, port: Any, method: str, pid: int) -> None:
        self.pid = pid
        self.stopped = asyncio.Event()
        self._port, self._method, self._original = port, method, getattr(port, method)
        setattr(port, method, self._call)

    async def _call(self, version: int) -> Any:
        os.kill(self.pid, signal.SIGSTOP)
        self.stopped.set()
        return await self._original(version)

    def over(self) -> None:
        setattr(self._port, self._method, self._original)


async def failed(processes: Processes, version: int, meanwhile: Callable[[], Awaitable[None]]) -> SyncAborted:
    syncing = asyncio.ensure_future(processes.manager.update_weights(version))
    await asyncio.wait_for(meanwhile(), QUICK_S)
    with pytest.raises(SyncAborted) as raised:
        await syncing
    assert (raised.value.version, raised.value.phase) == (version, "stage")
    processes.assert_serves(version - 1)
    return raised.value


@pytest.mark.usefixtures("ray_cluster")
class TestCollectiveProcesses:
    @pytest.mark.parametrize("rank", [0, 1])
    async def test_a_sender_that_is_killed_while_nodes_stage_aborts_at_once_and_can_be_replaced(
        self, rank: int, tmp_path: Path
    ):
        async with Processes(tmp_path, config_of(stage_s=100), ROWS) as processes:
            await processes.sync(1)
            pids = await processes.set_weights(2)
            stops = Stops(processes.trainer_ports[rank], "serve", pids[rank])

            async def kill() -> None:
                await stops.stopped.wait()
                await asyncio.sleep(0.5)
                os.kill(stops.pid, signal.SIGKILL)

            start_s = time.monotonic()
            error = await failed(processes, 2, kill)
            assert time.monotonic() - start_s < QUICK_S
            assert isinstance(error.__cause__, TransportError)
            assert f"trainer-{rank}" in str(error)
            stops.over()
            processes.replace_trainer(rank)
            await processes.sync(3)
            processes.assert_serves(3)
        assert not arenas_in(tmp_path)

    async def test_a_node_that_is_killed_while_it_stages_aborts_at_once_and_can_be_replaced(self, tmp_path: Path):
        async with Processes(tmp_path, config_of(stage_s=100), ROWS) as processes:
            await processes.sync(1)
            await processes.set_weights(2)
            stops = Stops(processes.node_port, "stage", owner_of_arena(tmp_path))

            async def kill() -> None:
                await stops.stopped.wait()
                await asyncio.sleep(0.5)
                os.kill(stops.pid, signal.SIGKILL)

            start_s = time.monotonic()
            error = await failed(processes, 2, kill)
            assert time.monotonic() - start_s < QUICK_S
            assert error.member in ("node-0", "trainer-0", "trainer-1")
            stops.over()
            processes.replace_node()
            await processes.sync(3)
            processes.assert_serves(3)
        assert not arenas_in(tmp_path)

    @pytest.mark.parametrize("rank", [0, 1])
    async def test_a_sender_that_stalls_is_named_at_the_deadline_and_takes_part_again_when_it_goes_on(
        self, rank: int, tmp_path: Path
    ):
        async with Processes(tmp_path, config_of(stage_s=4), ROWS) as processes:
            await processes.sync(1)
            pids = await processes.set_weights(2)
            stops = Stops(processes.trainer_ports[rank], "serve", pids[rank])
            start_s = time.monotonic()
            error = await failed(processes, 2, stops.stopped.wait)
            assert 3 < time.monotonic() - start_s < QUICK_S
            assert isinstance(error.__cause__, TransportTimeout)
            assert str(error).endswith(f"no sign of life from trainer-{rank}")
            os.kill(stops.pid, signal.SIGCONT)
            stops.over()
            await processes.sync(3)
            processes.assert_serves(3)

    async def test_a_node_that_stalls_is_named_at_the_deadline_and_takes_part_again_when_it_goes_on(
        self, tmp_path: Path
    ):
        async with Processes(tmp_path, config_of(stage_s=4), ROWS) as processes:
            await processes.sync(1)
            await processes.set_weights(2)
            stops = Stops(processes.node_port, "stage", owner_of_arena(tmp_path))

            syncing = asyncio.ensure_future(processes.manager.update_weights(2))
            await stops.stopped.wait()
            await asyncio.sleep(5)  # past the deadline; the manager now waits for the node to drop its slot
            os.kill(stops.pid, signal.SIGCONT)
            with pytest.raises(SyncAborted) as raised:
                await syncing
            assert str(raised.value).endswith("no sign of life from node-0")
            processes.assert_serves(1)
            stops.over()
            await processes.sync(3)
            processes.assert_serves(3)


def owner_of_arena(shm_dir: Path) -> int:
    """The process that owns the only arena: the one that holds its lock."""
    (arena,) = arenas_in(shm_dir)
    inode = (arena / "lock").stat().st_ino
    for line in Path("/proc/locks").read_text().splitlines():
        fields = line.split()
        if fields[1] == "FLOCK" and fields[5].endswith(f":{inode}"):
            return int(fields[4])
    raise AssertionError("nobody owns the arena")
