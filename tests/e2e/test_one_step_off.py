"""One-step-off-policy runs: how old what the trainer learns from is, and what generates while weights move."""

from __future__ import annotations

import shutil

import pytest

from tests.e2e.job import QUICK, Job
from tests.e2e.test_training import Run
from verl.experimental.one_step_off_policy import main_ppo
from verl.experimental.one_step_off_policy.main_ppo import CONFIG_DIR, CONFIG_NAME
from verl.experimental.one_step_off_policy.trainer import OneStepOffPolicyTrainer
from verl.utils.config import ConfigError

pytestmark = pytest.mark.e2e

STEPS = 4
SLOW_GENERATION = (
    "data.max_response_length=100",
    "actor_rollout_ref.rollout.ignore_eos=true",
    "actor_rollout_ref.rollout.max_num_seqs=1",
)
"""Longer than an update of the tiny model."""


def one_step_off(directory, *overrides):
    overrides = ("trainer.n_gpus_per_node=1", f"trainer.rollout_data_dir={directory / 'samples'}", *overrides)
    where = {"config_path": CONFIG_DIR, "config_name": CONFIG_NAME}
    return Run.of(directory, *overrides, trainer_class=OneStepOffPolicyTrainer, **where)


@pytest.fixture(scope="module")
def run(ray_cluster, tmp_path_factory, tiny_model):
    return one_step_off(
        tmp_path_factory.mktemp("one-step-off"),
        f"actor_rollout_ref.model.path={tiny_model}",
        "actor_rollout_ref.actor.entropy_coeff=0.01",
        "actor_rollout_ref.actor.optim.lr=1e-3",
        "checkpoint_engine.backend=gloo",
        f"trainer.total_training_steps={STEPS}",
        "trainer.save_freq=2",
        *SLOW_GENERATION,
    )


@pytest.fixture(scope="module")
def resumed(run, tmp_path_factory, tiny_model):
    return one_step_off(
        tmp_path_factory.mktemp("resumed"),
        f"actor_rollout_ref.model.path={tiny_model}",
        "checkpoint_engine.backend=naive",
        f"trainer.total_training_steps={STEPS}",
        "trainer.resume_mode=resume_path",
        f"trainer.resume_from_path={run.out / 'global_step_2'}",
    )


def staleness(run):
    names = ("training/staleness/min", "training/staleness/max")
    return [tuple(metrics[name] for name in names) for metrics in run.metrics.values()]


def test_what_the_trainer_learns_from_is_exactly_one_version_old_but_for_the_first_batch(run):
    assert staleness(run) == [(0, 0), (1, 1), (1, 1), (1, 1)]


def test_old_samples_are_weighted_by_how_likely_the_present_policy_is_to_make_them(run):
    deviations = [metrics["rollout_corr/rollout_is_std"] for metrics in run.metrics.values()]
    assert min(deviations[1:]) > 3 * deviations[0]  # which is the rounding of two engines


def test_a_version_is_published_staged_and_verified_while_the_engines_generate(run):
    first, *others, last = run.reports
    assert [report["version"] for report in run.reports] == list(range(STEPS + 1))
    assert all(report["phase_s"]["stage"] > 0 for report in run.reports)
    assert first["phase_s"]["wait"] == last["phase_s"]["wait"] == 0  # nothing generates before, or after
    for report in others:
        assert report["phase_s"]["wait"] > 0
        assert sum(report["phase_s"].values()) == pytest.approx(report["total_s"])


def test_waiting_for_the_engines_counts_as_generation_and_not_as_sync(run):
    """The trainer waits for them twice, before it has a batch, and in the middle of the sync."""
    for step in range(1, STEPS):
        metrics = run.metrics[step]
        waited_s = metrics["checkpoint_engine/wait_s"]
        (gen,), (sync,) = run.spans("trainer", "gen", step), run.spans("trainer", "update_weights", step)
        assert waited_s > 0
        assert metrics["timing_s/gen"] == pytest.approx(gen.stop_s - gen.start_s + waited_s, abs=1e-5)
        assert metrics["timing_s/update_weights"] == pytest.approx(sync.stop_s - sync.start_s - waited_s, abs=1e-5)


def test_the_timeline_shows_that_trainer_and_engines_work_at_the_same_time(run):
    generating = run.spans("replica-0", "generating")
    for step in range(1, STEPS):  # nothing is generated during the last
        (update,) = run.spans("trainer", "update_actor", step)
        assert any(span.start_s < update.stop_s and update.start_s < span.stop_s for span in generating)


def test_a_resumed_run_generates_again_what_was_on_its_way(run, resumed):
    assert list(resumed.metrics) == [3, 4]
    for step in (3, 4):
        assert resumed.questions(step) == run.questions(step)
    assert staleness(resumed) == [(0, 0), (1, 1)]


@pytest.mark.cells(7)
def test_a_killed_run_trains_on_the_batches_that_it_had_as_they_were_recorded(ray_cluster, warm, tmp_path, tiny_model):
    overrides = (
        "trainer.n_gpus_per_node=1",
        f"trainer.rollout_data_dir={tmp_path / 'samples'}",
        f"actor_rollout_ref.model.path={tiny_model}",
        f"trainer.total_training_steps={STEPS}",
        "trainer.save_freq=2",
        *SLOW_GENERATION,
    )
    with Job(tmp_path, *QUICK, *overrides, module=main_ppo.__name__, warm=warm) as job:
        job.wait_for_metrics(3)  # of which there is no checkpoint; the batch of step 4 is generated
        job.driver.kill()
        job.wait()
    shutil.copytree(tmp_path / "samples", tmp_path / "before")
    run = one_step_off(tmp_path, *overrides)
    assert run.samples(3) == run.samples(3, kind="before")
    assert run.metrics[3]["rollout/kept_tokens"] == sum(
        sum(row["response_mask"]) for row in run.samples(3) + run.samples(4)
    )
    assert run.metrics[3]["rollout/kept_dropped_tokens"] == 0
    assert staleness(run) == [(0, 0), (1, 1), (1, 1), (1, 1)]
    trained = [question for step in range(1, STEPS + 1) for question in run.questions(step)]
    assert len(set(trained)) == len(trained)


def test_engines_on_the_trainers_devices_are_refused(tmp_path):
    with pytest.raises(ConfigError, match="trainer.placement=colocated.*need trainer.placement=separate"):
        one_step_off(tmp_path, "trainer.placement=colocated")
