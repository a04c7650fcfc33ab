"""The arena: what readers see while versions come, go and fail."""

from __future__ import annotations

import faulthandler
import os
import re
import signal
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.checkpoint_engine.fakes import arenas_in
from tests.full_disk import no_file_larger_than
from verl.checkpoint_engine.errors import ActivationError, ConfigError, IntegrityError
from verl.checkpoint_engine.memory.arena import NodeArena
from verl.checkpoint_engine.memory.committed import committed_digest, committed_version, open_committed, read_committed
from verl.checkpoint_engine.memory.digest import Manifest, digest_pieces
from verl.checkpoint_engine.memory.slot import SlotView
from verl.checkpoint_engine.plan.layout import Layout
from verl.checkpoint_engine.plan.shards import ShardTable
from verl.checkpoint_engine.plan.sync_plan import make_plan
from verl.checkpoint_engine.plan.types import Box, Shard, TensorSpec
from verl.checkpoint_engine.publisher.committed import require_digest

LAYOUT = Layout.of(
    [TensorSpec(name="w", shape=(64, 32), dtype="float32"), TensorSpec(name="b", shape=(3,), dtype="bfloat16")]
)
PLAN = make_plan(
    LAYOUT,
    [ShardTable.of(LAYOUT, [Shard(spec.name, Box.whole(spec.shape)) for spec in LAYOUT.specs])],
    block_nbytes=4096,
)


@pytest.fixture(params=[2, 1], ids=["two slots", "one slot"])
def arena(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[NodeArena]:
    with NodeArena.create(shm_dir=tmp_path, job="test", node="node-0", layout=LAYOUT, slots=request.param) as arena:
        yield arena


@pytest.fixture
def two_slots(tmp_path: Path) -> Iterator[NodeArena]:
    with NodeArena.create(shm_dir=tmp_path, job="test", node="node-0", layout=LAYOUT, slots=2) as arena:
        yield arena


@pytest.fixture
def one_slot(tmp_path: Path) -> Iterator[NodeArena]:
    with NodeArena.create(shm_dir=tmp_path, job="test", node="node-0", layout=LAYOUT, slots=1) as arena:
        yield arena


def write(arena: NodeArena, version: int) -> Path:
    """Begin `version` and fill every tensor of it with its number."""
    path = arena.begin(version)
    view = SlotView(path, LAYOUT, writable=True)
    for _, tensor in view.tensors():
        tensor.fill_(version)
    view.close()
    return path


def commit(arena: NodeArena, version: int) -> Path:
    path = write(arena, version)
    digests = digest_pieces(arena.slot_view().bytes.numpy(), PLAN.extents)
    arena.commit(version, Manifest(version, PLAN, digests))
    return path


def served(arena: NodeArena, version: int) -> set[float]:
    """The values that a reader of `version` finds."""
    return {
        value for _, tensor in read_committed(arena.directory, version) for value in tensor.float().unique().tolist()
    }


def test_a_committed_version_is_what_readers_get(arena: NodeArena):
    assert committed_version(arena.directory) is None
    for version in (1, 2, 3):
        commit(arena, version)
        assert committed_version(arena.directory) == arena.version == version
        assert served(arena, version) == {version}


def test_with_two_slots_the_old_version_is_served_until_commit(two_slots: NodeArena):
    commit(two_slots, 1)
    write(two_slots, 2)
    assert served(two_slots, 1) == {1}
    assert two_slots.previous_version is None


def test_rollback_serves_the_previous_version_and_the_next_one_works(two_slots: NodeArena):
    commit(two_slots, 1)
    commit(two_slots, 2)
    assert two_slots.previous_version == 1
    assert two_slots.rollback() == 1
    assert served(two_slots, 1) == {1}
    with pytest.raises(IntegrityError, match="no previous version"):
        two_slots.rollback()
    commit(two_slots, 3)
    assert served(two_slots, 3) == {3}
    assert two_slots.previous_version == 1


def test_dropping_leaves_the_current_version_alone_and_replaces_the_spare_file(two_slots: NodeArena):
    commit(two_slots, 1)
    dropped = write(two_slots, 2)
    two_slots.drop()
    two_slots.drop()
    assert not dropped.exists()
    assert served(two_slots, 1) == {1}
    with pytest.raises(IntegrityError, match="nothing was staged for version 2"):
        two_slots.commit(2, Manifest(2, PLAN, np.zeros(len(PLAN), np.uint64)))
    commit(two_slots, 2)
    assert served(two_slots, 2) == {2}


def test_beginning_again_gives_up_what_was_begun_before(arena: NodeArena):
    first = write(arena, 1)
    begun = [first, *(arena.begin(version) for version in (2, 3, 4))]
    assert len(set(begun)) == len(begun)  # whoever still writes to one of them by its name writes to no later one
    assert not any(path.exists() for path in begun[:-1])


def test_with_one_slot_nothing_is_committed_between_begin_and_commit(one_slot: NodeArena):
    commit(one_slot, 1)
    write(one_slot, 2)
    assert committed_version(one_slot.directory) is None
    with pytest.raises(IntegrityError, match="holds nothing"):
        next(read_committed(one_slot.directory, 1))
    one_slot.drop()
    assert one_slot.version is None
    with pytest.raises(IntegrityError, match="no previous version"):
        one_slot.rollback()
    commit(one_slot, 3)
    assert served(one_slot, 3) == {3}


def test_one_slot_takes_half_the_memory(two_slots: NodeArena, tmp_path: Path):
    with NodeArena.create(shm_dir=tmp_path, job="other", node="node-0", layout=LAYOUT, slots=1) as small:
        assert small.nbytes * 2 == two_slots.nbytes == 2 * LAYOUT.nbytes
        assert len(list(small.directory.glob("slot-*"))) == 1


def test_a_reader_keeps_its_version_untouched_while_the_writer_takes_the_slot(arena: NodeArena):
    commit(arena, 1)
    with open_committed(arena.directory, 1) as (_, view):
        for version in (2, 3):
            commit(arena, version)
        assert view.tensor(LAYOUT.specs[0]).unique().tolist() == [1]
    assert served(arena, 3) == {3}


def test_whoever_writes_into_a_committed_version_is_killed(arena: NodeArena):
    commit(arena, 1)
    with open_committed(arena.directory, 1) as (_, view):
        if not (writer := os.fork()):
            faulthandler.disable()
            view.bytes.zero_()
            os._exit(0)
        assert os.waitstatus_to_exitcode(os.waitpid(writer, 0)[1]) == -signal.SIGSEGV
        assert torch.equal(dict(view.tensors())["w"], torch.full((64, 32), 1.0))


def test_a_writer_that_should_be_gone_cannot_damage_the_next_version(arena: NodeArena):
    zombie = SlotView(arena.begin(1), LAYOUT, writable=True)
    arena.drop()
    commit(arena, 2)
    commit(arena, 3)
    zombie.bytes.fill_(66)
    assert served(arena, 3) == {3}
    arena.reverify(3)
    zombie.close()


def test_the_same_version_number_may_come_twice(two_slots: NodeArena):
    commit(two_slots, 1)
    commit(two_slots, 1)
    write(two_slots, 2)
    two_slots.reverify(1)
    two_slots.drop()
    commit(two_slots, 1)
    assert two_slots.previous_version == 1
    two_slots.rollback()
    two_slots.reverify(1)


def test_a_reader_that_asks_for_another_version_is_refused(arena: NodeArena):
    commit(arena, 4)
    with pytest.raises(IntegrityError, match="holds version 4; version 5 was requested"):
        next(read_committed(arena.directory, 5))


def test_a_reader_of_an_arena_that_is_gone_is_refused(arena: NodeArena):
    commit(arena, 4)
    arena.close()
    with pytest.raises(IntegrityError, match="holds nothing"):
        next(read_committed(arena.directory, 4))


def test_a_version_that_is_given_up_while_it_is_opened_is_refused(arena: NodeArena):
    commit(arena, 4)
    next(arena.directory.glob("*.manifest")).unlink()
    with pytest.raises(IntegrityError, match="removed while it was being opened"):
        next(read_committed(arena.directory, 4))


def test_a_byte_that_flips_after_commit_is_found_and_named(arena: NodeArena):
    path = commit(arena, 1)
    arena.reverify(1)
    with path.open("r+b") as file:
        file.seek(5000)
        file.write(b"\xff")
    with pytest.raises(IntegrityError, match=r"w\[32:64, 0:32\] \(bytes 4096\.\.8192, from trainer-0\)"):
        arena.reverify(1)


def test_what_an_engine_says_that_it_has_loaded_is_held_against_what_was_committed(arena: NodeArena, tmp_path: Path):
    commit(arena, 3)
    digest = committed_digest(str(arena.directory), 3)
    assert digest
    require_digest(str(arena.directory), 3, digest)
    require_digest(str(tmp_path / "on another host"), 3, "anything")
    with pytest.raises(ActivationError, match=f"other weights as version 3 .*anything, not {digest}"):
        require_digest(str(arena.directory), 3, "anything")


def test_a_manifest_of_another_version_is_not_committed(arena: NodeArena):
    write(arena, 1)
    with pytest.raises(IntegrityError, match="nothing was staged for version 1"):
        arena.commit(1, Manifest(2, PLAN, np.zeros(len(PLAN), np.uint64)))


def test_too_little_memory_is_reported_with_both_numbers_before_anything_is_allocated(tmp_path: Path):
    huge = Layout.of([TensorSpec(name="w", shape=(10**15,), dtype="uint8")])
    with pytest.raises(ConfigError) as raised:
        NodeArena.create(shm_dir=tmp_path, job="test", node="node-0", layout=huge, slots=2)
    message = str(raised.value)
    assert f"needs {2 * huge.nbytes} bytes" in message
    assert re.search(r"; \d+ bytes .* are free", message)
    assert "checkpoint_engine.slots=1" in message
    assert not arenas_in(tmp_path)


def test_memory_that_runs_out_while_allocating_leaves_nothing_behind(tmp_path: Path):
    with no_file_larger_than(4096), pytest.raises(ConfigError, match="cannot reserve"):
        NodeArena.create(shm_dir=tmp_path, job="test", node="node-0", layout=LAYOUT, slots=2)
    assert not arenas_in(tmp_path)


def test_an_owner_whose_memory_ran_out_can_begin_again_when_there_is_some(two_slots: NodeArena):
    commit(two_slots, 1)
    write(two_slots, 2)
    with no_file_larger_than(4096), pytest.raises(ConfigError, match="cannot reserve"):
        two_slots.drop()
    assert served(two_slots, 1) == {1}
    commit(two_slots, 3)
    assert served(two_slots, 3) == {3}


def test_only_the_user_may_enter_and_read(arena: NodeArena):
    commit(arena, 1)
    assert arena.directory.stat().st_mode & 0o777 == 0o700
    slots = [path for path in arena.directory.glob("slot-*") if path.suffix != ".manifest"]
    assert slots
    assert all(path.stat().st_mode & 0o777 == 0o600 for path in slots)


def test_a_second_arena_of_the_same_job_and_node_is_refused(arena: NodeArena, tmp_path: Path):
    with pytest.raises(ConfigError, match="in use by another process"):
        NodeArena.create(shm_dir=tmp_path, job="test", node="node-0", layout=LAYOUT, slots=1)
    commit(arena, 1)
    assert served(arena, 1) == {1}


def test_closing_removes_everything_even_while_somebody_reads(arena: NodeArena, tmp_path: Path):
    commit(arena, 1)
    with open_committed(arena.directory, 1) as (_, view):
        arena.close()
        arena.close()
        assert not arenas_in(tmp_path)
        assert view.tensor(LAYOUT.specs[0]).unique().tolist() == [1]


def test_tensors_stay_valid_as_long_as_somebody_holds_them(two_slots: NodeArena):
    commit(two_slots, 1)
    kept = [tensor for _, tensor in read_committed(two_slots.directory, 1)]
    two_slots.close()
    assert torch.equal(kept[0], torch.ones(64, 32))
