"""No shared memory outlives its owner, however the owner ends."""

from __future__ import annotations

import fcntl
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.checkpoint_engine.fakes import arenas_in, send_signal, soon
from verl.checkpoint_engine.memory.janitor import YOUNG_S, sweep

OWNER = """
import sys, time
from pathlib import Path
from verl.checkpoint_engine.memory.arena import NodeArena
from verl.checkpoint_engine.plan.layout import Layout
from verl.checkpoint_engine.plan.types import TensorSpec

layout = Layout.of([TensorSpec(name="w", shape=(1024,), dtype="uint8")])
arena = NodeArena.create(shm_dir=Path(sys.argv[1]), job="test", node="node-0", layout=layout, slots=2)
print(arena._janitor.pid, flush=True)
{then}
"""


class Owner:
    """A process in a group of its own that owns an arena under `shm_dir`."""

    def __init__(self, shm_dir: Path, then: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", OWNER.format(then=then), str(shm_dir)],
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        assert self.process.stdout is not None
        self.janitor_pid = int(self.process.stdout.readline())

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        self.process.stdout.close()


@pytest.fixture
def owner_of(tmp_path: Path) -> Iterator[Callable[[str], Owner]]:
    owners: list[Owner] = []

    def start(then: str) -> Owner:
        owners.append(Owner(tmp_path, then))
        return owners[-1]

    yield start
    for owner in owners:
        owner.close()


def is_gone(pid: int) -> bool:
    """Ended. Its new parent may not have read the exit status yet, so a zombie counts as ended."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return True


@pytest.mark.parametrize("signal_number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_a_signal_that_ends_the_owner_ends_arena_and_janitor(
    signal_number: signal.Signals, owner_of: Callable[[str], Owner], tmp_path: Path
):
    owner = owner_of("time.sleep(60)")
    assert arenas_in(tmp_path)
    assert not is_gone(owner.janitor_pid)
    owner.process.send_signal(signal_number)
    assert soon(lambda: not arenas_in(tmp_path))
    assert soon(lambda: is_gone(owner.janitor_pid))


@pytest.mark.parametrize("signal_number", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL])
def test_a_signal_to_the_whole_process_group_does_not_stop_the_janitor_from_cleaning(
    signal_number: signal.Signals, owner_of: Callable[[str], Owner], tmp_path: Path
):
    owner = owner_of("time.sleep(60)")
    os.killpg(owner.process.pid, signal_number)
    assert soon(lambda: not arenas_in(tmp_path))
    assert soon(lambda: is_gone(owner.janitor_pid))


@pytest.mark.parametrize("then", ["", "import os; os._exit(1)", "raise RuntimeError", "arena.close()"])
def test_an_owner_that_ends_by_itself_leaves_nothing(then: str, owner_of: Callable[[str], Owner], tmp_path: Path):
    owner = owner_of(then)
    owner.process.wait(timeout=60)
    assert soon(lambda: not arenas_in(tmp_path))
    assert soon(lambda: is_gone(owner.janitor_pid))


def aged(directory: Path) -> Path:
    """`directory`, last changed long ago."""
    then = time.time() - 10 * YOUNG_S
    os.utime(directory, (then, then))
    return directory


def test_sweeping_removes_what_nobody_holds_and_nothing_else(tmp_path: Path, owner_of: Callable[[str], Owner]):
    owner_of("time.sleep(60)")
    (live,) = arenas_in(tmp_path)
    aged(live)
    for name in ("verl-abandoned", "verl-locked", "verl-young", "verl-unlockable", "other-abandoned"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "slot-0.0").write_bytes(b"weights")
    for name in ("verl-abandoned", "verl-locked", "verl-young", "other-abandoned"):
        (tmp_path / name / "lock").touch()
    for name in ("verl-abandoned", "verl-locked", "verl-unlockable", "other-abandoned"):
        aged(tmp_path / name)
    with (tmp_path / "verl-locked" / "lock").open("r+b") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert sweep(tmp_path, "verl-") == [tmp_path / "verl-abandoned"]
    assert not (tmp_path / "verl-abandoned").exists()
    assert arenas_in(tmp_path) == sorted(
        [live, *(tmp_path / f"verl-{kind}" for kind in ("locked", "unlockable", "young"))]
    )


def test_a_node_that_is_killed_can_be_replaced_at_once(tmp_path: Path, owner_of: Callable[[str], Owner]):
    owner = owner_of("time.sleep(60)")
    send_signal(owner.janitor_pid, signal.SIGSTOP)
    owner.process.kill()
    owner.process.wait()
    threading.Timer(0.3, os.kill, (owner.janitor_pid, signal.SIGCONT)).start()
    owner_of("time.sleep(60)")  # the same job and node: waits for the janitor
    assert soon(lambda: is_gone(owner.janitor_pid))
    assert len(arenas_in(tmp_path)) == 1


def test_when_owner_and_janitor_are_both_killed_the_next_job_cleans_up(
    tmp_path: Path, owner_of: Callable[[str], Owner]
):
    owner = owner_of("time.sleep(60)")
    os.kill(owner.janitor_pid, signal.SIGKILL)
    assert soon(lambda: is_gone(owner.janitor_pid))
    owner.close()
    (left,) = arenas_in(tmp_path)
    aged(left)
    owner_of("time.sleep(60)")  # the same job and node again: it could not start beside the old directory
    assert len(arenas_in(tmp_path)) == 1
