"""Fully asynchronous runs: the same as hybrid ones where nothing may be stale, and sound where it may."""

from __future__ import annotations

import gzip
import json
import shutil

import pytest

from benchmarks.modes_analysis import analyse
from tests.e2e import brittle_backend, held_responses
from tests.e2e.job import QUICK, Job
from tests.e2e.test_training import REWARD, Run
from verl.checkpoint_engine.errors import SyncAborted
from verl.experimental.agent_loop.errors import AgentCodeError
from verl.experimental.fully_async_policy import fully_async_main
from verl.experimental.fully_async_policy.trainer import FullyAsyncTrainer
from verl.utils.config import ConfigError
from verl.utils.failures import in_one_line

pytestmark = pytest.mark.e2e

STEPS = held_responses.STEPS
PROMPTS = held_responses.OF_A_STEP
"""Of a step."""
ON_POLICY = ("async_training.staleness_threshold=0", "async_training.trigger_parameter_sync_step=1")
STALE = ("async_training.staleness_threshold=1", "async_training.trigger_parameter_sync_step=1")
LONG_RESPONSES = (
    "data.max_response_length=200",
    "actor_rollout_ref.rollout.ignore_eos=true",
    "actor_rollout_ref.rollout.max_num_seqs=1",
)
"""One after the other, each longer than a step of the tiny model's trainer."""
HELD_RESPONSES = (
    "data.max_response_length=40",
    "actor_rollout_ref.rollout.ignore_eos=true",
    *held_responses.OVERRIDES,
)
"""One after the other; every sync finds one in flight."""
TRACED = (
    "global_profiler.tool=torch",
    "global_profiler.steps=[2]",
    "actor_rollout_ref.actor.profiler.enable=true",
    "actor_rollout_ref.actor.profiler.all_ranks=true",
)


def fully_async(directory, *overrides):
    where = {"config_path": fully_async_main.CONFIG_DIR, "config_name": fully_async_main.CONFIG_NAME}
    overrides = (f"trainer.rollout_data_dir={directory / 'samples'}", *overrides)
    return Run.of(directory, *overrides, trainer_class=FullyAsyncTrainer, **where)


@pytest.fixture(scope="module")
def repeatable(tmp_path_factory, tiny_model):
    """Overrides of a run whose every number is decided by its seed: greedy, float32, a reward that varies."""
    reward = tmp_path_factory.mktemp("reward") / "reward.py"
    reward.write_text(REWARD)
    return (
        "trainer.n_gpus_per_node=1",
        f"actor_rollout_ref.model.path={tiny_model}",
        f"custom_reward_function.path={reward}",
        "algorithm.adv_estimator=reinforce_plus_plus",
        "actor_rollout_ref.actor.optim.lr=1e-3",
        f"actor_rollout_ref.actor.ppo_mini_batch_size={PROMPTS}",
        "actor_rollout_ref.actor.fsdp_config.dtype=float32",
        "actor_rollout_ref.rollout.dtype=float32",
        "actor_rollout_ref.rollout.do_sample=false",
        "algorithm.rollout_correction.accept_truncated_sampling=true",
        "actor_rollout_ref.rollout.n=1",
        f"trainer.total_training_steps={STEPS}",
    )


@pytest.fixture(scope="module")
def hybrid(ray_cluster, tmp_path_factory, repeatable):
    directory = tmp_path_factory.mktemp("hybrid")
    samples = f"trainer.rollout_data_dir={directory / 'samples'}"
    return Run.of(directory, *repeatable, f"data.train_batch_size={PROMPTS}", samples, *TRACED)


def test_without_staleness_it_is_hybrid_training(hybrid, ray_cluster, tmp_path, repeatable):
    ours = fully_async(
        tmp_path,
        *repeatable,
        *ON_POLICY,
        "algorithm.rollout_correction.rollout_is=null",
        "checkpoint_engine.backend=gloo",
    )
    assert [report["version"] for report in ours.reports] == [report["version"] for report in hybrid.reports]
    for step in range(1, STEPS + 1):
        assert ours.questions(step) == hybrid.questions(step)
        assert ours.metrics[step]["training/staleness/max"] == 0
        for name in ("critic/score/mean", "actor/grad_norm", "actor/lr", "actor/pg_loss", "response_length/mean"):
            expected = hybrid.metrics[step][name]
            assert ours.metrics[step][name] == pytest.approx(expected, rel=1e-3, abs=1e-6), (step, name)


@pytest.fixture(scope="module")
def stale(ray_cluster, tmp_path_factory, repeatable):
    return fully_async(
        tmp_path_factory.mktemp("stale"),
        *repeatable,
        *STALE,
        *HELD_RESPONSES,
        *TRACED,
        "checkpoint_engine.backend=gloo",
    )


def test_responses_that_a_sync_interrupts_go_on_with_the_new_weights(stale):
    metrics = list(stale.metrics.values())
    assert sum(step["fully_async/partial/total_partial_num"] for step in metrics) > 0
    assert max(step["fully_async/partial/max_partial_span"] for step in metrics) >= 2
    assert all(0 <= step["training/staleness/min"] <= step["training/staleness/max"] <= 2 for step in metrics)
    assert max(step["training/staleness/max"] for step in metrics) >= 1
    assert {step["response_length/min"] for step in metrics} == {40}  # the budget, no more and no less
    assert all(step.get("fully_async/count/staleness_samples", 0) <= 2 * PROMPTS for step in metrics)


def test_it_is_told_how_long_samples_took_and_how_long_the_trainer_waited_for_them(stale):
    for metrics in stale.metrics.values():
        order = [metrics[f"fully_async/processing_time/{name}"] for name in ("min", "tp50", "tp95", "tp99", "max")]
        assert order[0] > 0
        assert order == sorted(order)
        assert order[0] <= metrics["fully_async/processing_time/avg"] <= order[-1]
        assert metrics["fully_async/processing_time/avg"] >= metrics["agent_loop/generate_s/mean"]
        idle = metrics["fully_async/total_wait_time"] / metrics["timing_s/step"]
        assert idle == pytest.approx(metrics["fully_async/trainer/idle_ratio"])


def test_the_timeline_shows_engines_that_generate_while_a_version_is_published_and_staged(stale):
    generating, paused = stale.spans("replica-0", "generating"), stale.spans("replica-0", "paused")
    staged_meanwhile = 0
    for version in range(1, STEPS):
        (update,) = stale.spans("trainer", "update_actor", version)
        (publish,), (stage,) = stale.spans("sync", "publish", version), stale.spans("sync", "stage", version)
        (activate,) = stale.spans("sync", "activate", version)
        assert update.stop_s <= publish.start_s < stage.stop_s <= activate.start_s
        staged_meanwhile += any(span.start_s < stage.stop_s and stage.start_s < span.stop_s for span in generating)
        assert not any(span.start_s < stage.stop_s and stage.start_s < span.stop_s for span in paused)
        assert any(span.start_s < activate.stop_s and activate.start_s < span.stop_s for span in paused)
    assert staged_meanwhile
    loads = {span.version for span in stale.spans("replica-0", "loading")}
    assert loads == set(range(STEPS + 1))
    reports = {report["version"]: report for report in stale.reports}
    for report in reports.values():
        assert sum(seconds for _, seconds in report["laps"]) == pytest.approx(report["total_s"])


@pytest.mark.parametrize("mode", ["hybrid", "stale"])
def test_the_benchmark_of_the_modes_understands_the_files_of_a_run(mode, request):
    run = request.getfixturevalue(mode)
    found = analyse(run.out, 1, 0)
    assert found["steps"] == STEPS - 1
    assert 0 < found["trainer_idle_ratio"] + found["sync_ratio"] < 1
    assert 0 < found["rollout_idle_ratio"] < 1
    assert 0 < found["load_s"] <= found["paused_s"] <= found["sync_total_s"]
    assert (found["generating_while_staging"] > 0) == (mode == "stale")


@pytest.mark.parametrize("mode", ["hybrid", "stale"])
def test_a_step_that_shall_be_profiled_leaves_a_trace_of_every_rank(mode, request):
    run = request.getfixturevalue(mode)
    assert [path.name for path in (run.out / "profile").iterdir()] == ["step_2_rank_0.json.gz"]
    trace = json.loads(gzip.decompress((run.out / "profile" / "step_2_rank_0.json.gz").read_bytes()))
    events = {event.get("name"): event for event in trace["traceEvents"]}
    update = events["update_actor"]
    (span,) = run.spans("trainer", "update_actor", 2)
    assert 0 < update["dur"] / 1e6 <= span.stop_s - span.start_s
    assert "compute_log_prob" in events
    backward = [name for name in events if name and "Backward" in name]
    assert backward and any(name.startswith("Optimizer.step") for name in events if name)


def test_responses_are_completed_before_a_sync_where_they_must_not_be_interrupted(ray_cluster, tmp_path, repeatable):
    run = fully_async(
        tmp_path,
        *repeatable,
        *STALE,
        *LONG_RESPONSES,
        "async_training.partial_rollout=false",
        "checkpoint_engine.backend=naive",
    )
    metrics = list(run.metrics.values())
    assert {step["fully_async/partial/total_partial_num"] for step in metrics} == {0}
    assert max(step["training/staleness/max"] for step in metrics) >= 1
    assert max(step.get("checkpoint_engine/wait_s", 0) for step in metrics) > 0
    assert sum(step["timing_s/update_weights"] for step in metrics) < sum(report["total_s"] for report in run.reports)


@pytest.fixture(scope="module")
def resumed(ray_cluster, warm, tmp_path_factory, repeatable):
    """A run that is killed after its third step, of which the second is saved, and the same command again.

    Its samples are drawn at random: nobody can generate them a second time.
    """
    directory = tmp_path_factory.mktemp("resumed")
    overrides = (
        *repeatable,
        *STALE,
        *LONG_RESPONSES,
        "actor_rollout_ref.rollout.do_sample=true",
        "trainer.save_freq=2",
        f"trainer.rollout_data_dir={directory / 'samples'}",
    )
    with Job(directory, *QUICK, *overrides, module=fully_async_main.__name__, warm=warm) as job:
        job.wait_for_checkpoint(2)
        job.wait_for_metrics(3)
        job.driver.kill()
        job.wait()
        left = job.left()
    assert left == []
    shutil.copytree(directory / "samples", directory / "before")
    return fully_async(directory, *overrides)


def test_no_prompt_is_lost_or_trained_twice_when_a_run_is_killed_and_resumed(resumed, hybrid):
    assert list(resumed.metrics) == list(range(1, STEPS + 1))
    trained = [question for step in range(1, STEPS + 1) for question in resumed.questions(step)]
    drawn = [question for step in range(1, STEPS + 1) for question in hybrid.questions(step)]
    assert sorted(trained) == sorted(drawn)


def test_a_killed_run_trains_on_the_tokens_that_it_had_as_they_were_recorded(resumed):
    assert resumed.samples(3) == resumed.samples(3, kind="before")
    assert resumed.metrics[3]["rollout/kept_tokens"] > 0  # the checkpoint's queue may have had some of the step's
    assert resumed.metrics[3]["rollout/kept_dropped_tokens"] == 0
    assert all(metrics["training/staleness/max"] <= 2 for metrics in resumed.metrics.values())
    assert not (resumed.out / "kept_samples").exists()  # it is complete


def test_a_prompt_that_cannot_be_generated_ends_the_run_with_its_error(ray_cluster, tmp_path, tiny_model):
    (tmp_path / "loop.py").write_text(
        "from verl.experimental.agent_loop import AgentLoopBase\n\n\n"
        "class Broken(AgentLoopBase):\n"
        "    async def run(self, sampling_params, **row):\n"
        "        raise ValueError('the loop is broken')\n"
    )
    (tmp_path / "loops.yaml").write_text(f"- {{name: broken, _target_: '{tmp_path / 'loop.py'}:Broken'}}\n")
    with pytest.raises(AgentCodeError, match="the loop is broken") as caught:
        fully_async(
            tmp_path,
            f"actor_rollout_ref.model.path={tiny_model}",
            f"actor_rollout_ref.rollout.agent.agent_loop_config_path={tmp_path / 'loops.yaml'}",
            "actor_rollout_ref.rollout.agent.default_agent_loop=broken",
        )
    assert in_one_line(caught.value).endswith(": agent loop 'broken' failed: ValueError: the loop is broken")


def test_a_sync_that_fails_after_the_trainer_went_on_is_made_again_with_its_present_weights(
    ray_cluster, tmp_path, repeatable
):
    run = fully_async(tmp_path, *repeatable, *STALE, *backend("brittle"))
    failed = brittle_backend.LAST_VERSION + 1
    outcomes = [(report["version"], report["outcome"], report["retries"]) for report in run.reports]
    assert outcomes[: failed + 1] == [*((version, "committed", 0) for version in range(failed)), (failed, "aborted", 0)]
    assert outcomes[failed + 1][0] in (failed, failed + 1)
    assert {outcome for _, outcome, _ in outcomes[failed + 1 :]} == {"committed"}
    assert outcomes[-1][0] == STEPS
    assert max(step["training/staleness/max"] for step in run.metrics.values()) <= 2


def test_a_sync_that_fails_again_ends_the_run_with_its_error(ray_cluster, tmp_path, repeatable):
    with pytest.raises(SyncAborted, match="the previous version stays in service: .*the wire is cut") as raised:
        fully_async(tmp_path, *repeatable, *STALE, *backend("broken"))
    assert raised.value.phase == "stage"
    outcomes = [report["outcome"] for report in Run(tmp_path).reports]
    assert outcomes == ["committed"] * (brittle_backend.LAST_VERSION + 1) + ["aborted"] * 2


def backend(name):
    return (
        f"checkpoint_engine.backend={name}",
        f"checkpoint_engine.custom_backend_module={brittle_backend.__name__}",
    )


def test_engines_on_the_trainers_devices_are_refused(tmp_path):
    with pytest.raises(ConfigError, match="trainer.placement=colocated.*need trainer.placement=separate"):
        fully_async(tmp_path, "trainer.placement=colocated")
