"""Whom the members of a sync let near the weights: their own user, on the job's hosts, and nobody else."""

from __future__ import annotations

import asyncio
import ipaddress
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import msgspec
import psutil
import pytest

from tests.checkpoint_engine.backends import BACKENDS, EXAMPLE, using
from tests.checkpoint_engine.fakes import arenas_in
from tests.checkpoint_engine.member_processes import ProcessFleet
from tests.strangers import HEARS_NOTHING_S, NOBODY, needs_root, talk
from verl.checkpoint_engine.config import CheckpointEngineConfig
from verl.checkpoint_engine.links.wire import OwnerAddress
from verl.checkpoint_engine.memory.committed import open_committed

pytestmark = pytest.mark.cells(3)

needs_mooncake = pytest.mark.skipif(find_spec("mooncake") is None, reason="mooncake is not installed")
LIBRARIES_THAT_TAKE_NO_ADDRESS = ("mooncake", "kimi_ckpt_engine")
"""Mooncake listens on all interfaces, whatever it is told."""


def config_of(backend: str, **more: Any) -> CheckpointEngineConfig:
    return CheckpointEngineConfig.from_mapping({"backend": backend, "retries": 0, **more})


def listeners(pids: list[int]) -> set[tuple[str, int]]:
    return {
        (one.laddr.ip, one.laddr.port)
        for pid in pids
        for one in psutil.Process(pid).net_connections("inet")
        if one.status == psutil.CONN_LISTEN
    }


def pids_of(fleet: ProcessFleet) -> list[int]:
    return [port.member.pid for port in (*fleet.trainers, *fleet.nodes)]


def reachable(place: tuple[str, int]) -> tuple[str, int]:
    host, port = place
    return ("127.0.0.1" if ipaddress.ip_address(host).is_unspecified else host), port


SHAPES = [
    *(using(*param.values, "auto") for param in BACKENDS if param.values[0] != EXAMPLE),
    using("tcp", "chain"),
    using("nixl", "chain"),
    using("mooncake", "chain"),
]


@needs_root
@pytest.mark.parametrize(("backend", "topology"), SHAPES)
async def test_another_user_of_the_host_gets_no_answer_wherever_a_member_listens(
    backend: str, topology: str, tmp_path: Path
) -> None:
    async with ProcessFleet(config_of(backend, topology=topology), tmp_path, nodes=2) as fleet:
        await fleet.sync(1)
        found = sorted(listeners(pids_of(fleet)))
        assert backend == "naive" or found
        answers = await asyncio.to_thread(talk, [reachable(place) for place in found], NOBODY, HEARS_NOTHING_S)
        heard = dict(zip(found, answers, strict=True))
        assert {place: answer for place, answer in heard.items() if answer not in ("shut out", "nothing")} == {}
        await fleet.sync(2)
        fleet.assert_serves(2)


@pytest.mark.parametrize(("backend", "topology"), SHAPES)
async def test_members_of_one_host_listen_inside_of_it_alone_where_their_library_can(
    backend: str, topology: str, tmp_path: Path
) -> None:
    async with ProcessFleet(config_of(backend, topology=topology), tmp_path, nodes=2) as fleet:
        await fleet.sync(1)
        hosts = {ipaddress.ip_address(host) for host, _ in listeners(pids_of(fleet))}
        if backend in LIBRARIES_THAT_TAKE_NO_ADDRESS:
            assert any(host.is_unspecified for host in hosts)
        elif backend == "nixl":
            assert not any(host.is_unspecified for host in hosts)  # UCX: every interface by its address
        else:
            assert all(host.is_loopback for host in hosts)


def stranger(user: int, what: str, peer: str, address: int) -> str:
    script = Path(__file__).with_name("mooncake_stranger.py")
    command = [sys.executable, str(script), str(user), what, peer, str(address)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    return done.stdout


@needs_root
@needs_mooncake
@pytest.mark.parametrize("backend", LIBRARIES_THAT_TAKE_NO_ADDRESS)
async def test_another_user_reads_and_writes_nothing_through_mooncake(backend: str, tmp_path: Path) -> None:
    async with ProcessFleet(config_of(backend), tmp_path) as fleet:
        await fleet.sync(1)
        owner = msgspec.json.decode(fleet.manager._membership.trainer_members[0].address, type=OwnerAddress)
        peer, region = owner.wire.decode(), owner.region

        async def attempt(user: int, what: str) -> str:
            return await asyncio.to_thread(stranger, user, what, peer, region)

        assert await attempt(os.geteuid(), "read") == "done"
        assert await attempt(NOBODY, "read") != "done"
        assert await attempt(NOBODY, "write") != "done"
        fleet.assert_serves(1)
        await fleet.sync(2)
        fleet.assert_serves(2)


def slots_of(pid: int) -> list[int]:
    """Where a process has its slots mapped."""
    maps = Path(f"/proc/{pid}/maps").read_text().splitlines()
    return [int(line.partition("-")[0], 16) for line in maps if "/slot-" in line]


@needs_mooncake
@pytest.mark.parametrize(
    ("backend", "topology"), [("mooncake", "auto"), ("mooncake", "chain"), ("kimi_ckpt_engine", "auto")]
)
async def test_nobody_writes_into_a_committed_slot_through_mooncake_not_even_the_same_user(
    backend: str, topology: str, tmp_path: Path
) -> None:
    async with ProcessFleet(config_of(backend, topology=topology), tmp_path) as fleet:
        await fleet.sync(1)
        (directory,) = arenas_in(tmp_path)
        with open_committed(directory, 1) as (_, view):
            before = bytes(view.bytes.numpy())
            for place in slots_of(fleet.node.member.pid):
                for _, port in listeners([fleet.node.member.pid]):
                    writing = asyncio.to_thread(stranger, os.geteuid(), "write", f"127.0.0.1:{port}", place)
                    assert await writing != "done"
            assert bytes(view.bytes.numpy()) == before
        await fleet.sync(2)
        fleet.assert_serves(2)
