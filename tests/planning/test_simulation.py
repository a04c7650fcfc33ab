"""Simulated steps: cases by hand, bounds that hold, and the modes as they were measured."""

from __future__ import annotations

from dataclasses import replace

import pytest

from verl.planning.simulation import Outcome, Simulation, SyncSeconds, Workload, simulate

NO_SYNC = SyncSeconds(total_s=0.0, blocked_s=0.0, pause_s=0.0)
EVEN = Workload(
    prompts=4,
    responses=2,
    replicas=1,
    slots=4,
    tokens=10,
    spread=0.0,
    token_s=0.1,
    update_s=3.0,
    steps=30,
    sync_every=2,
)
"""A step has 8 responses of 1 s in 4 slots: 2 s of generation, 3 of training."""


def run(mode: str, work: Workload, sync: SyncSeconds = NO_SYNC) -> Outcome:
    return Simulation(mode, work, sync).run()


def test_hybrid_does_one_thing_after_the_other():
    found = run("hybrid", EVEN, SyncSeconds(total_s=1.0, blocked_s=0.1, pause_s=0.5))
    assert found.step_s == pytest.approx(6.0)
    assert found.waits_for_samples == pytest.approx(2 / 6)
    assert found.waits_for_sync == pytest.approx(1 / 6)
    assert found.engines_idle == pytest.approx(4 / 6)
    assert found.tokens_per_s == pytest.approx(80 / 6)
    assert (found.staleness, found.most_staleness) == (0, 0)


def test_one_step_off_takes_what_takes_longer_and_is_one_step_old():
    found = run("one_step_off", EVEN, SyncSeconds(total_s=1.0, blocked_s=0.1, pause_s=0.5))
    assert found.step_s == pytest.approx(4.0)
    assert found.waits_for_samples == pytest.approx(0.0)
    assert (found.staleness, found.most_staleness) == (1, 1)
    slow = run("one_step_off", replace(EVEN, update_s=1.0))
    assert slow.step_s == pytest.approx(2.0)
    assert slow.waiting_side == "trainer"


def test_fully_async_hides_the_sync():
    found = run("fully_async", replace(EVEN, steps=31), SyncSeconds(total_s=1.0, blocked_s=0.1, pause_s=0.0))
    assert found.step_s == pytest.approx(3.05)
    assert found.waiting_side == "engines"  # their budget is spent: training takes longer
    assert found.waits_for_sync == pytest.approx(0.1 / 6.1)


@pytest.mark.parametrize("staleness", [0.0, 0.5, 1.0, 2.0])
def test_samples_are_no_older_than_the_budget_allows(staleness: float):
    work = replace(EVEN, staleness=staleness, spread=1.0, update_s=0.5, slots=2, steps=80)
    found = run("fully_async", work)
    # Started at most `1 + staleness` syncs before the end of the one in which they are trained.
    assert found.most_staleness < (2 + staleness) * work.sync_every
    assert found.staleness <= found.most_staleness


def test_work_at_once_on_the_same_cores_is_slower():
    found = run("one_step_off", replace(EVEN, trainer_slowed=1.5, engine_slowed=2.0))
    # 2 s of generation at half the rate are 4, in which the trainer does 4 / 1.5 of its 3.
    assert found.step_s == pytest.approx(4 + (3 - 4 / 1.5))


def test_failures_cost_what_they_interrupt():
    work = replace(EVEN, replicas=2, slots=2, failure_s=40.0, restart_s=5.0, steps=200)
    failing, well = run("hybrid", work), run("hybrid", replace(work, failure_s=0.0))
    assert failing.failures > 5
    assert failing.step_s > well.step_s * 1.05
    assert well.failures == 0


def test_the_same_seed_gives_the_same_steps():
    work = replace(EVEN, spread=1.0)
    assert simulate(work, NO_SYNC) == simulate(work, NO_SYNC)
    assert run("hybrid", work) != run("hybrid", replace(work, seed=1))


def test_the_modes_come_out_as_they_were_measured():
    """docs/benchmarks/modes.md. Seconds of a step are of the hybrid run (2.58 s, 59 % generation, 4.5 % sync), slower
    rates on shared cores of the one-step-off run; the fully asynchronous run is predicted."""
    work = Workload(
        prompts=32,
        responses=8,
        replicas=1,
        slots=8,
        tokens=11.4,
        spread=0.3,
        token_s=0.59 * 2.58 / 32 / 11.4,
        update_s=0.365 * 2.58,
        trainer_slowed=1.6,
        engine_slowed=1.385,
        staleness=0.5,
        sync_every=2,
        steps=65,
    )
    hybrid, one_off, free = simulate(work, SyncSeconds(total_s=0.116, blocked_s=0.016, pause_s=0.05))
    assert hybrid.tokens_per_s == pytest.approx(1134, rel=0.05)
    assert one_off.tokens_per_s == pytest.approx(1427, rel=0.05)
    assert free.tokens_per_s == pytest.approx(1447, rel=0.05)
    assert one_off.waits_for_samples == pytest.approx(0.21, abs=0.03)
    assert free.waits_for_samples == pytest.approx(0.14, abs=0.1)
    assert free.waits_for_sync == pytest.approx(0.004, abs=0.002)
    assert one_off.engines_idle == pytest.approx(0.07, abs=0.03)
    assert (one_off.staleness, one_off.most_staleness) == (1, 1)
    assert 1.0 <= free.staleness <= 1.6
    assert free.most_staleness <= 3
