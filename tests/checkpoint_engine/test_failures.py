"""Members that are killed, stopped or sent a wrong bit, at every phase: the same must hold on every backend."""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from tests.checkpoint_engine.backends import PACKAGES
from tests.checkpoint_engine.fakes import arenas_in, soon, spare_slot
from tests.checkpoint_engine.member_processes import TRAINERS, ProcessFleet
from verl.checkpoint_engine.config import CheckpointEngineConfig
from verl.checkpoint_engine.errors import IntegrityError, SyncAborted, TransportError, TransportTimeout

OPTIONS: dict[str, tuple[str, dict[str, object]]] = {
    "naive": ("naive", {}),
    "gloo": ("gloo", {"interface": "lo"}),
    "gloo-chain": ("gloo", {"interface": "lo"}),
    "nixl": ("nixl", {}),
    "nixl-tcp": ("nixl", {"ucx_tls": "tcp"}),
    "mooncake": ("mooncake", {"host": "127.0.0.1"}),
    "kimi_ckpt_engine": ("kimi_ckpt_engine", {"host": "127.0.0.1"}),
    "gloo-deltas": ("gloo", {"interface": "lo"}),
    "tcp-deltas": ("tcp", {"host": "127.0.0.1", "num_connections": 1}),
    "nixl-deltas": ("nixl", {}),
    "mooncake-deltas": ("mooncake", {"host": "127.0.0.1"}),
    "kimi_ckpt_engine-deltas": ("kimi_ckpt_engine", {"host": "127.0.0.1"}),
}
NODES = {"kimi_ckpt_engine": 2, "kimi_ckpt_engine-deltas": 2, "gloo-chain": 3, "gloo-deltas": 2}
"""Where one would not pass anything on to another."""
STAGES_ONLY = (
    *("gloo-chain", "nixl-tcp", "mooncake", "kimi_ckpt_engine"),
    *("gloo-deltas", "nixl-deltas", "mooncake-deltas", "kimi_ckpt_engine-deltas"),
)
"""Other phases are as without a chain, or with another transport: nodes alone read, so a wire does nothing in them, and
what it tears down after a death is torn down after one in the middle of a stage, too."""
KILL, STOP, FLIP = "killed", "stopped", "sent a wrong bit"
FAR_S, NEAR_S = 300.0, 20.0
"""Of each phase: a death is noticed long before, a stall at the deadline."""
POOLED = {"mooncake": 3, "kimi_ckpt_engine": 3, "kimi_ckpt_engine-deltas": 8, "nixl-tcp": TRAINERS}
"""Connections (and threads) more or less that a library keeps for later; a broken transfer that leaks holds more.

Mooncake keeps as many to an owner as were read at once: nodes that pass deltas on read their owners only for what came
wrong, each of the two up to four pieces at a time.

UCX: who is read may answer through the reader's connection or open one of its own, which then stays. It depends on
who is faster, so a node has up to one socket more for each owner.
"""


@dataclass(frozen=True, kw_only=True)
class Case:
    backend: str
    who: str
    how: str
    when: str

    def __str__(self) -> str:
        return f"{self.backend}: {self.who} {self.how} at {self.when}"

    @property
    def config(self) -> CheckpointEngineConfig:
        name, options = OPTIONS[self.backend]
        timeout_s = NEAR_S if self.how == STOP else FAR_S
        deadlines = {"publish_s": timeout_s, "stage_s": timeout_s, "verify_s": timeout_s, "commit_s": NEAR_S}
        return CheckpointEngineConfig.from_mapping(
            {
                "backend": name,
                "delta": "always" if self.backend.endswith("-deltas") else "off",
                "engine_kwargs": {name: options},
                "update_weights_bucket_megabytes": 1,
                "retries": 1 if self.how == KILL else 0,
                "deadlines": deadlines,
            }
        )

    @property
    def succeeds(self) -> bool:
        """The owner has done its part: its bytes have arrived, or are read without it (from shared memory).

        A wrong bit is no failure where the node can read that piece again.
        """
        if self.who == "node-0":
            return self.how == FLIP and self.config.backend not in ("naive", "gloo")
        through_memory = self.backend in ("nixl", "nixl-deltas")
        return self.when == "verify" or (through_memory and (self.how, self.when) == (STOP, "stage"))


def cases() -> Iterator[Any]:
    for backend, (name, _) in OPTIONS.items():
        for who, how, when in (
            ("trainer-1", KILL, "publish"),
            ("trainer-1", STOP, "publish"),
            ("trainer-1", KILL, "stage"),
            ("trainer-1", STOP, "stage"),
            ("trainer-1", KILL, "verify"),
            ("node-0", KILL, "publish"),
            ("node-0", KILL, "stage"),
            ("node-0", STOP, "stage"),
            ("node-0", KILL, "verify"),
            ("node-0", KILL, "commit"),
            ("node-0", FLIP, "stage"),
        ):
            if backend == "naive" and when == "stage" and how != FLIP:
                continue  # it has none: publishing writes to the slot
            if backend in STAGES_ONLY and when != "stage":
                continue
            if backend == "gloo" and when in ("verify", "commit"):
                continue  # as with the next two: its groups are torn down as after a death at stage
            if backend == "gloo-deltas" and who == "trainer-1":
                continue  # sockets hold what it sends: it may have done its part before it falls
            if name not in ("naive", "gloo") and (how, when) == (STOP, "publish"):
                continue  # transports take no part in publishing: as with `gloo`, and it takes until the deadline
            case = Case(backend=backend, who=who, how=how, when=when)
            missing = [package for package in PACKAGES[name] if find_spec(package) is None]
            yield pytest.param(
                case, id=str(case), marks=pytest.mark.skipif(bool(missing), reason=f"{missing} not installed")
            )


async def prepare(case: Case, fleet: ProcessFleet) -> None:
    """What shall happen during the next sync."""
    member, number = fleet[case.who].member, {KILL: signal.SIGKILL, STOP: signal.SIGSTOP, FLIP: None}[case.how]
    if case.backend == "naive" and case.how == FLIP:
        fleet.node.before["verify"] = lambda: flip_bit(spare_slot(fleet.shm_dir))
    elif case.when == "stage":
        if case.who == "trainer-1":
            await fleet.node.member.in_stage(1, number, member.pid)
        else:
            await fleet.node.member.on_landing(number, member.pid)
    elif case.when == "publish" and case.who.startswith("trainer"):
        await member.fall_in_copy(number)
    else:
        port = fleet.trainers[0] if case.when == "publish" else fleet.node
        port.before[case.when] = lambda: member.signal(number)


def flip_bit(path: Path) -> None:
    with path.open("r+b") as file:
        first = file.read(1)[0]
        file.seek(0)
        file.write(bytes([first ^ 1]))


@pytest.mark.cells(7)
@pytest.mark.parametrize("case", cases())
async def test_the_previous_version_serves_until_the_next_sync_and_nothing_is_left(case: Case, tmp_path: Path):
    async with ProcessFleet(case.config, tmp_path, nodes=NODES.get(case.backend, 1)) as fleet:
        await fleet.sync(0)
        await fleet.sync(1)  # now every member has used both slots
        before = await fleet.resources()
        await prepare(case, fleet)
        start_s = time.monotonic()
        if case.succeeds:
            await fleet.sync(2)
        else:
            with pytest.raises(SyncAborted) as raised:
                await fleet.sync(2)
            assert_named(case, raised.value)
        assert time.monotonic() - start_s < FAR_S
        fleet.assert_serves(2 if case.succeeds else 1, arena=(case.who, case.how) != ("node-0", KILL))

        fleet.node.before.clear()
        fleet.trainers[0].before.clear()
        dead = fleet.dead()
        for name in dead:
            await fleet.replace(name)
        if case.backend == "nixl-tcp" and case.who == "node-0":
            dead = [name for name in dead if not name.startswith("trainer")]  # UCX may have ended owners that answered
        assert dead == ([case.who] if case.how == KILL else [])
        if case.how == STOP:
            fleet[case.who].member.signal(signal.SIGCONT)
        for version in (3, 4):  # what a stalled transfer held may be let go at the end of the next one
            await fleet.sync(version)
            fleet.assert_serves(version)
        await assert_nothing_leaks(fleet, before, POOLED.get(case.backend, POOLED.get(fleet.config.backend, 0)))
    assert soon(lambda: not arenas_in(tmp_path)), arenas_in(tmp_path)
    assert soon(lambda: not processes_of(tmp_path)), processes_of(tmp_path)


def assert_named(case: Case, error: SyncAborted) -> None:
    cause = error.__cause__
    assert isinstance(cause, {KILL: TransportError, STOP: TransportTimeout, FLIP: IntegrityError}[case.how])
    expected = "verify" if case.how == FLIP else case.when
    # A node that dies while ranks publish is missed when it is asked for the next thing.
    phases = ("publish", "stage") if (case.who, case.when) == ("node-0", "publish") else (expected,)
    if case.backend == "naive" and case.how == KILL:
        phases += ("publish",)  # at which the second attempt fails; other backends find out when they connect anew
    assert error.version == 2
    assert error.phase in phases
    # A wrong byte that is passed on is noticed by every node; the first one to say so is named.
    named = [f"node-{index}" for index in range(NODES.get(case.backend, 1))] if case.how == FLIP else [case.who]
    assert any(name in str(error) for name in named)


async def assert_nothing_leaks(fleet: ProcessFleet, before: dict[str, dict[str, int]], pooled: int) -> None:
    """Each member holds no more than after the first sync; what a broken connection held may take a moment to go."""
    end_s = time.monotonic() + FAR_S
    while more := grown(before, await fleet.resources(), pooled):
        assert time.monotonic() < end_s, more
        await asyncio.sleep(0.05)


def grown(
    before: dict[str, dict[str, int]], now: dict[str, dict[str, int]], pooled: int
) -> dict[str, tuple[dict[str, int], dict[str, int]]]:
    """Members that hold more than they did, and than their library may keep: what they hold, and what they held."""
    return {
        name: (now[name], before[name])
        for name in now
        if any(now[name][kind] > count + pooled * (kind != "slots") for kind, count in before[name].items())
    }


def processes_of(shm_dir: Path) -> list[str]:
    """Command lines that name `shm_dir`: janitors of arenas there."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            command = path.read_bytes().decode(errors="replace")
        except OSError:
            continue
        if str(shm_dir) in command:
            found.append(command)
    return found
