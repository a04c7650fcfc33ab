"""Where a run goes on after trainer ranks were lost, without ranks: they remember as much as a test says."""

from __future__ import annotations

import re
import time
from types import SimpleNamespace
from typing import Any

import pytest

from verl.trainer.fleet.recovery import TRAINER_RANKS, Recovery
from verl.trainer.fleet.trainer_ranks import PARTS, STATE, Loss
from verl.trainer.ppo.going_back import GoingBack, Learned, StateLost
from verl.trainer.ppo.step import Step
from verl.utils.timing import Patience


class Died(Exception):
    pass


class Ranks:
    """Of whom some die wherever a test calls `die`."""

    def __init__(self) -> None:
        self.restarts = 0
        self.loss: Loss | None = None
        self.remembered: int | None = None
        """The last step whose state they have left in memory."""
        self.memory = SimpleNamespace(keep=self._keep, forget=lambda: None)
        self.loses_what_it_keeps = False
        self._lost = False

    def _keep(self, step: int) -> None:
        if not self.loses_what_it_keeps:
            self.remembered = step

    def die(self) -> None:
        self._lost = True
        raise Died

    def restart_lost(self) -> int:
        if not self._lost:
            return 0
        self._lost, self.restarts = False, self.restarts + 1
        self.loss = Loss("rank 0 died", self.remembered, began_s=0.0, seconds={STATE: 1.0})
        return 1


class Run:
    """What a loop does, as a list of what was done."""

    def __init__(self) -> None:
        self.ranks, recovery = Ranks(), Recovery(max_restarts=0)
        recovery.watch(TRAINER_RANKS, self.ranks.restart_lost)
        self.done: list[str] = []
        self.deaths: list[str] = []
        """Of what is done, what ranks die in, once each."""
        self.mistakes: list[str] = []
        """What fails for another reason."""
        cluster: Any = SimpleNamespace(recovery=recovery, trainer_ranks=self.ranks)
        self.going_back = GoingBack(cluster, kept="all else", learn=self._learn, restore=self._restore)

    def do(self, what: str) -> None:
        self.done.append(what)
        if what in self.mistakes:
            raise ValueError(what)
        if what in self.deaths:
            self.deaths.remove(what)
            self.ranks.die()

    def _learn(self, step: Learned) -> Any:
        self.do(f"learn {step.now.number}")
        return f"batch {step.now.number}"

    def _restore(self) -> tuple[int, None]:
        self.done.append("restore")
        return 0, None

    def train(self, number: int) -> Any:
        now = Step(number, Patience())

        def then() -> None:
            if not now.is_synced:
                self.do(f"sync {number}")
                now.is_synced = True
            self.do(f"save {number}")

        batch: Any = None
        return self.going_back.train(Learned(now, batch, 0.0), then)


@pytest.fixture
def run() -> Run:
    run = Run()
    run.ranks.remembered = 0
    return run


@pytest.mark.parametrize(
    ("death", "done"),
    [
        ("learn 1", ["learn 1", "learn 1", "sync 1", "save 1"]),
        ("sync 1", ["learn 1", "sync 1", "sync 1", "save 1"]),
        ("save 1", ["learn 1", "sync 1", "save 1", "save 1"]),
    ],
)
def test_what_was_done_when_ranks_died_is_not_done_again(run: Run, death: str, done: list[str]):
    run.deaths = [death]
    assert run.train(1) == "batch 1"
    assert run.done == done


def test_a_step_whose_state_was_not_in_memory_yet_is_learned_and_synced_again(run: Run):
    run.deaths, run.ranks.loses_what_it_keeps = ["save 1"], True
    assert run.train(1) == "batch 1"
    assert run.done == ["learn 1", "sync 1", "save 1", "learn 1", "sync 1", "save 1"]


def test_ranks_that_lose_the_step_before_learn_it_from_its_batch_and_then_the_present_one(run: Run):
    run.ranks.loses_what_it_keeps = True
    run.train(1)
    run.done.clear()
    run.deaths = ["learn 2"]
    assert run.train(2) == "batch 2"
    assert run.done == ["learn 2", "learn 1", "learn 2", "sync 2", "save 2"]


def test_ranks_that_die_again_while_they_catch_up_do_it_once_more(run: Run):
    run.ranks.loses_what_it_keeps = True
    run.train(1)
    run.done.clear()
    run.deaths = ["learn 2", "learn 1"]
    assert run.train(2) == "batch 2"
    assert run.done == ["learn 2", "learn 1", "learn 1", "learn 2", "sync 2", "save 2"]


def test_without_memory_the_loop_starts_anew_from_what_is_restored(run: Run):
    run.ranks.remembered, run.ranks.loses_what_it_keeps = None, True
    starts: list[int] = []

    def train_after(start: int) -> str:
        starts.append(start)
        run.train(start + 1)
        return "the result"

    run.deaths = ["sync 4"]
    assert run.going_back.until_done(train_after, 3) == "the result"
    assert starts == [3, 0]
    assert run.done == ["learn 4", "sync 4", "restore", "learn 1", "sync 1", "save 1"]


def test_ranks_that_are_lost_before_the_first_step_lose_the_state(run: Run):
    run.deaths = ["begin"]
    with pytest.raises(StateLost) as raised:
        run.going_back.begin(lambda: run.do("begin"))
    assert isinstance(raised.value.__cause__, Died)


def test_a_failure_for_another_reason_is_raised_as_it_is(run: Run):
    run.mistakes = ["sync 1"]
    with pytest.raises(ValueError, match="sync 1"):
        run.train(1)
    assert run.done == ["learn 1", "sync 1"]
    with pytest.raises(ValueError, match="another"):
        run.going_back.catch_up(0, ValueError("another"))


def test_the_time_to_read_a_checkpoint_counts_as_that_of_the_state(run: Run):
    run.ranks.remembered, run.deaths = None, ["learn 1"]

    def train_after(step: int) -> Any:
        return run.train(step + 1)

    run.going_back.until_done(train_after, 0)
    loss = run.ranks.loss
    assert loss is not None
    assert loss.seconds[STATE] > 1.0


def test_a_restart_is_told_with_its_parts_which_are_what_the_step_after_it_has_as_metrics():
    loss = Loss("rank 0 died", 3, began_s=time.monotonic() - 60, seconds={"processes": 41.23, "models": 4.0})
    assert re.fullmatch(
        r"\d+\.\d s \(noticed 0\.0, ended 0\.0, resources 0\.0, processes 41\.2, models 4\.0, state 0\.0\)", str(loss)
    )
    metrics = loss.metrics()
    assert metrics.pop("recovery/step_s") >= 60
    assert metrics == {f"recovery/{part}_s": loss.seconds.get(part, 0.0) for part in PARTS}
