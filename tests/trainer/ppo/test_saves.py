"""Checkpoints that are written in the background, as the driver sees them."""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import Future

import pytest

from verl.checkpoint_engine.support.loop_thread import LoopThread
from verl.single_controller.errors import WorkerDied
from verl.trainer.checkpoints import LATEST, CheckpointDirectory, TrainerState
from verl.trainer.ppo.saves import Saves
from verl.utils.disk import DiskFull
from verl.workers.config import TrainerConfig
from verl.workers.engine.background import Written

DEADLINE_S = 120.0
TOOK = [Written(2.0, 0.0), Written(3.0, 0.5)]


class Ranks:
    """They have written when `outcome` says so."""

    def __init__(self):
        self.outcome = Future()
        self.began = []

    def begin(self, directory):
        (directory / "actor").mkdir()
        self.began.append(directory)

    def written(self):
        return asyncio.wrap_future(self.outcome)


@pytest.fixture
def loop():
    loop = LoopThread("test")
    yield loop
    loop.close()


@pytest.fixture
def checkpoints(tmp_path):
    return CheckpointDirectory(TrainerConfig(default_local_dir=str(tmp_path / "out")))


@pytest.fixture
def make(checkpoints, loop):
    return lambda in_background=True, stops=False: Saves(
        checkpoints, loop, in_background=in_background, stops_on_full_disk=stops
    )


def begin(saves, ranks, step, *, wait=False):
    saves.save(TrainerState(step, {}, 0.0, {}), ranks.begin, lambda: Awaited(ranks), wait=wait)


class Awaited:
    def __init__(self, ranks):
        self._ranks = ranks

    def __await__(self):
        return self._ranks.written().__await__()

    def get(self):
        return self._ranks.outcome.result(DEADLINE_S)


def found(checkpoints):
    return sorted(path.name for path in checkpoints.root.iterdir())


def test_training_goes_on_and_the_pointer_moves_when_files_and_records_are_there(make, checkpoints):
    saves, ranks = make(), Ranks()
    begin(saves, ranks, 1)
    saves.publish()
    assert found(checkpoints) == [".global_step_1.partial"]
    ranks.outcome.set_result(TOOK)
    saves.close()
    assert found(checkpoints) == ["global_step_1", LATEST]
    metrics = saves.metrics()
    assert metrics.keys() == {"checkpoint/blocked_s", "checkpoint/background_s", "checkpoint/step_waited_s"}
    assert (metrics["checkpoint/background_s"], metrics["checkpoint/step_waited_s"]) == (3.0, 0.5)


def test_files_without_the_records_of_their_step_are_no_checkpoint(make, checkpoints):
    saves, ranks = make(), Ranks()
    begin(saves, ranks, 1)
    ranks.outcome.set_result(TOOK)
    saves.close()
    assert checkpoints.find() is None
    saves.publish()
    assert checkpoints.find().name == "global_step_1"


def test_a_later_save_waits_for_an_earlier_one(make, checkpoints):
    saves, first, second = make(), Ranks(), Ranks()
    begin(saves, first, 1)
    saves.publish()
    later = threading.Thread(target=begin, args=(saves, second, 2))
    later.start()
    later.join(0.2)
    assert later.is_alive()
    assert not second.began
    first.outcome.set_result(TOOK)
    later.join(DEADLINE_S)
    assert second.began
    assert checkpoints.find().name == "global_step_1"
    second.outcome.set_result(TOOK)
    saves.close()


def test_the_last_save_is_waited_for(make):
    saves, ranks = make(), Ranks()
    last = threading.Thread(target=begin, args=(saves, ranks, 1), kwargs={"wait": True})
    last.start()
    last.join(0.2)
    assert last.is_alive()
    ranks.outcome.set_result(TOOK)
    last.join(DEADLINE_S)
    assert not last.is_alive()


def test_a_writer_that_dies_leaves_the_checkpoint_before(make, checkpoints, caplog):
    saves = make()
    for step, outcome in ((1, None), (2, WorkerDied("rank 1 died", group="trainer", rank=1))):
        ranks = Ranks()
        begin(saves, ranks, step)
        saves.publish()
        ranks.outcome.set_exception(outcome) if outcome else ranks.outcome.set_result(TOOK)
    saves.end()
    assert "step 2 is not saved: rank 1 died" in caplog.text
    assert found(checkpoints) == ["global_step_1", LATEST]
    assert checkpoints.last == checkpoints.find()


def test_a_disk_that_is_full_leaves_the_checkpoint_before_and_the_next_save_tries_again(make, checkpoints, caplog):
    saves = make()
    for step in (1, 2, 3):
        ranks = Ranks()
        begin(saves, ranks, step)
        saves.publish()
        full = step == 2
        ranks.outcome.set_exception(DiskFull("no space for it")) if full else ranks.outcome.set_result(TOOK)
    saves.close()
    assert "step 2 is not saved, the next save tries again: no space for it" in caplog.text
    assert found(checkpoints) == ["global_step_1", "global_step_3", LATEST]


@pytest.mark.parametrize("stops", [True, False])
def test_a_run_ends_with_a_disk_that_is_full_if_it_is_to_or_if_there_is_no_next_save(make, checkpoints, stops):
    saves, ranks = make(stops=stops), Ranks()
    begin(saves, ranks, 1)
    saves.publish()
    ranks.outcome.set_exception(DiskFull("no space for it"))
    with pytest.raises(DiskFull):
        saves.close()
    assert found(checkpoints) == []


def test_what_cannot_begin_is_not_deleted_while_others_write_it(make, checkpoints):
    saves, ranks = make(), Ranks()

    def begin_and_fail(directory):
        ranks.begin(directory)
        threading.Timer(0.2, end, [directory]).start()
        raise DiskFull("no space for the critic's")

    seen = []

    def end(directory):
        seen.append(directory.exists())
        ranks.outcome.set_result(TOOK)

    saves.save(TrainerState(1, {}, 0.0, {}), begin_and_fail, lambda: Awaited(ranks), wait=False)
    assert seen == [True]
    assert found(checkpoints) == []
    with pytest.raises(DiskFull, match="critic's"):
        saves.close()


def test_a_save_that_is_waited_for_raises_what_happened(make, checkpoints):
    saves, ranks = make(in_background=False), Ranks()
    ranks.outcome.set_exception(WorkerDied("rank 1 died", group="trainer", rank=1))
    with pytest.raises(WorkerDied):
        begin(saves, ranks, 1)
    assert found(checkpoints) == []
    assert "checkpoint/background_s" not in saves.metrics()
