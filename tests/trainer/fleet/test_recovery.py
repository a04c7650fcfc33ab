"""What is looked at when work has failed, in which order, and how often the work is tried again."""

from __future__ import annotations

import pytest

from verl.trainer.fleet.recovery import (
    AGENT_LOOPS,
    BATCH,
    MACHINES,
    NODES,
    REPLICAS,
    SERVICE,
    STEP,
    SYNC,
    TRAINER_RANKS,
    WEIGHTS,
    Recovery,
    RestartLimit,
)


class Run:
    """`died[kind]` are found at the first look at that kind."""

    def __init__(self, max_restarts=2, **died):
        self.looks = []
        self.died = died
        self.recovery = Recovery(max_restarts=max_restarts)
        for kind in (MACHINES, NODES, REPLICAS, WEIGHTS, AGENT_LOOPS, TRAINER_RANKS):
            self.recovery.watch(kind, lambda kind=kind: self.look(kind))

    def look(self, kind):
        self.looks.append(kind)
        return self.died.pop(kind, 0)


class Work:
    def __init__(self, *failures):
        self.failures = list(failures)
        self.told = []

    def __call__(self, failure=None):
        self.told.append(str(failure))
        if self.failures:
            raise self.failures.pop(0)
        return "done"

    def under(self, run, work, **since):
        return run.recovery.attempt(work, self, failures=(RuntimeError,), again=self, **since)


@pytest.mark.parametrize(
    ("work", "looks"),
    [
        (SYNC, [MACHINES, NODES, MACHINES, REPLICAS]),
        (SERVICE, [MACHINES, REPLICAS, WEIGHTS]),
        (BATCH, [MACHINES, REPLICAS, WEIGHTS, AGENT_LOOPS]),
        (STEP, [TRAINER_RANKS]),
    ],
)
def test_what_work_needs_is_looked_at_with_what_that_needs_before_it(work, looks):
    run = Run()
    run.recovery.look(work)
    assert run.looks == looks


@pytest.mark.parametrize("kind", [MACHINES, NODES, REPLICAS])
def test_a_sync_that_failed_is_made_again_once_if_something_that_it_needs_had_died(kind):
    work = Work(RuntimeError("lost"))
    assert work.under(Run(**{kind: 1}), SYNC) == "done"
    assert work.told == ["None", "lost"]
    with pytest.raises(RuntimeError, match="again"):
        Work(RuntimeError("lost"), RuntimeError("again")).under(Run(**{kind: 1}), SYNC)


def test_work_that_failed_though_nothing_died_is_not_tried_again():
    run = Run(**{AGENT_LOOPS: 1})
    with pytest.raises(RuntimeError, match="wrong"):
        Work(RuntimeError("wrong")).under(run, SYNC)
    assert AGENT_LOOPS not in run.looks


def test_failures_of_another_kind_are_raised_without_a_look():
    run = Run()
    with pytest.raises(ValueError, match="mistake"):
        Work(ValueError("mistake")).under(run, BATCH)
    assert run.looks == []


def test_what_somebody_else_has_started_again_meanwhile_counts():
    run = Run()
    before = run.recovery.changes(BATCH)
    run.recovery.found(AGENT_LOOPS, 1)
    assert Work(RuntimeError("lost")).under(run, BATCH, since=before) == "done"
    with pytest.raises(RuntimeError):
        Work(RuntimeError("lost")).under(run, BATCH)


def test_a_batch_is_tried_again_as_often_as_a_run_may_restart():
    run = Run(max_restarts=3)
    run.recovery.watch(REPLICAS, lambda: 1)  # dies every time
    work = Work(*(RuntimeError(str(time)) for time in range(10)))
    with pytest.raises(RuntimeError, match="3"):
        work.under(run, BATCH)
    assert len(work.told) == 4


def test_a_run_that_cannot_go_on_says_why():
    run = Run()

    def none_left():
        raise RuntimeError("no rollout engine is in service")

    run.recovery.watch(REPLICAS, none_left)
    with pytest.raises(RuntimeError, match="no rollout engine"):
        Work(RuntimeError("lost")).under(run, SYNC)


def test_a_step_is_made_again_whenever_trainer_ranks_were_started_again():
    run = Run(max_restarts=0)
    run.recovery.watch(TRAINER_RANKS, lambda: 2)
    work = Work(*(RuntimeError(str(time)) for time in range(10)))
    assert work.under(run, STEP) == "done"


def test_restarts_are_limited_within_a_window():
    now = [0.0]
    limit = RestartLimit(2, 60.0, now_s=lambda: now[0])
    assert [limit.take(), limit.take(), limit.take()] == [True, True, False]
    now[0] = 59.0
    assert not limit.take()
    now[0] = 60.0
    assert [limit.take(), limit.take(), limit.take()] == [True, True, False]
    assert not RestartLimit(0, 60.0).take()
