"""Foreign things where ours should be: directories, FIFOs, links, sockets, files of others. And names that are none."""

from __future__ import annotations

import os
import socket
import time
from pathlib import Path

import numpy as np
import pytest

from tests.hostile.test_parsers import LAYOUT, RANKS
from verl.checkpoint_engine.config import CheckpointEngineConfig
from verl.checkpoint_engine.errors import ConfigError, IntegrityError, PlanError
from verl.checkpoint_engine.memory.arena import ARENA_PREFIX, NodeArena
from verl.checkpoint_engine.memory.committed import committed_version
from verl.checkpoint_engine.memory.janitor import YOUNG_S, sweep
from verl.checkpoint_engine.parameter_server.metas import load_metas
from verl.checkpoint_engine.parameter_server.safetensors_files import read_checkpoint
from verl.checkpoint_engine.plan.shards import ShardTable
from verl.checkpoint_engine.sync.rollout_node import RolloutNode
from verl.trainer.fleet.wanted_replicas import WantedReplicas


def a_socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as made:
        made.bind(os.path.relpath(path))


THINGS = {
    "a directory": Path.mkdir,
    "a FIFO": os.mkfifo,
    "a link to nothing": lambda path: path.symlink_to(path.with_name("nothing")),
    "a link to itself": lambda path: path.symlink_to(path),
    "a link to a device": lambda path: path.symlink_to("/dev/zero"),
    "a socket": a_socket,
}


@pytest.fixture(params=THINGS)
def put(request, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    return THINGS[request.param]


def long_ago(path: Path) -> None:
    then = time.time() - 2 * YOUNG_S
    os.utime(path, (then, then))


def make_arena(shm_dir: Path, job: str = "ours") -> NodeArena:
    return NodeArena.create(shm_dir=shm_dir, job=job, node="node-0", layout=LAYOUT, slots=1)


def test_a_foreign_lock_stops_no_job_and_is_left_alone(tmp_path, put):
    foreign = tmp_path / f"{ARENA_PREFIX}foreign"
    foreign.mkdir()
    put(foreign / "lock")
    long_ago(foreign)
    assert sweep(tmp_path, ARENA_PREFIX) == []
    with make_arena(tmp_path):
        pass
    assert os.path.lexists(foreign / "lock")


def test_a_foreign_thing_in_the_place_of_a_directory_stops_no_job(tmp_path, put):
    foreign = tmp_path / f"{ARENA_PREFIX}foreign"
    put(foreign)
    with make_arena(tmp_path):
        pass
    assert os.path.lexists(foreign)


def test_a_directory_behind_a_link_is_not_removed(tmp_path):
    precious = tmp_path / "precious"
    precious.mkdir()
    (precious / "lock").touch()
    (tmp_path / f"{ARENA_PREFIX}link").symlink_to(precious)
    long_ago(precious)
    assert sweep(tmp_path, ARENA_PREFIX) == []
    assert (precious / "lock").exists()


def test_what_a_job_of_this_user_left_is_removed(tmp_path):
    left = tmp_path / f"{ARENA_PREFIX}left"
    left.mkdir()
    (left / "lock").touch()
    long_ago(left)
    assert sweep(tmp_path, ARENA_PREFIX) == [left]


def test_num_replicas_that_is_no_file_is_told_once_and_ignored(caplog, tmp_path, put):
    wanted = WantedReplicas(tmp_path / "num_replicas")
    put(tmp_path / "num_replicas")
    assert wanted.changed() is None
    assert wanted.changed() is None
    assert len(caplog.records) == (put is not THINGS["a link to nothing"])


@pytest.mark.parametrize(
    ("content", "count"),
    [
        (b"3\n", 3),
        (b" 12 ", 12),
        (b"007", 7),
        *((content, None) for content in (b"", b"0", b"-1", b"1.5", b"\xff\xfe", b"\x00", "\u0663".encode(), b"three")),
        *((content, None) for content in (b"1000000", b"9" * 5_000, b"9" * 10**7)),
    ],
)
def test_only_a_number_of_replicas_is_one(tmp_path, content, count):
    wanted = WantedReplicas(tmp_path / "num_replicas")
    (tmp_path / "num_replicas").write_bytes(content)
    assert wanted.changed() == count


@pytest.mark.parametrize(
    ("read", "error"),
    [
        (load_metas, ConfigError),
        (lambda path: read_checkpoint([path]), ConfigError),
        (lambda path: committed_version(path.parent), IntegrityError),
    ],
)
def test_a_file_that_is_none_is_a_named_error_and_nobody_waits_for_it(tmp_path, put, read, error):
    path = tmp_path / "current"
    put(path)
    if error is IntegrityError and put is THINGS["a link to nothing"]:
        assert read(path) is None  # nothing is committed there
        return
    with pytest.raises(error, match="current"):
        read(path)


JOBS = ["", "a/b", "../../etc", "/", "a\0b", "a b", "\n", "\u00e4", "x" * 65, "x" * 10_000, "\ud800"]


@pytest.mark.parametrize("job", JOBS)
def test_a_job_that_cannot_name_a_directory_is_an_error_before_anything_is_made(tmp_path, job):
    with pytest.raises(ConfigError, match="job=.*must be 1 to 64 letters"):
        make_arena(tmp_path, job)
    with pytest.raises(ConfigError, match="job=.*must be 1 to 64 letters"):
        RolloutNode(0, CheckpointEngineConfig(), job=job, shm_dir=tmp_path)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("job", ["a", "my-job", "123-abcd", "a.b_c", "x" * 64])
def test_a_job_names_the_directory_of_its_arena(tmp_path, job):
    with make_arena(tmp_path, job) as arena:
        assert arena.directory == tmp_path / f"{ARENA_PREFIX}{job}-node-0"


@pytest.mark.parametrize(
    ("tensor", "start", "stop"),
    [(99, 0, 1), (-1, 0, 1), (0, -1, 1), (0, 2, 1), (0, 0, 9), (0, 2**40, 2**41), (2**40, 0, 1)],
)
def test_shards_of_another_model_are_refused(tensor, start, stop):
    good = RANKS[0]
    table = ShardTable(*(np.array(part, np.int64) for part in (good.tensor, good.start, good.stop)))
    table.require_inside(LAYOUT)
    table.tensor[1], table.start[1, 0], table.stop[1, 0] = tensor, start, stop
    with pytest.raises(PlanError, match="shard 1 does not lie inside a tensor of the model"):
        ShardTable.decode(table.encode()).require_inside(LAYOUT)
