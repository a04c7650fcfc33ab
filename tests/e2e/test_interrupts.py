"""Runs that somebody ends, or that lose a process, at any moment: quick, in one line, with nothing left behind."""

import json
import os
import re
import signal
import time

import pytest

from tests.e2e.faults import FROM_MEMORY
from tests.e2e.job import within
from verl.utils.tracking import read_metrics

pytestmark = [pytest.mark.e2e, pytest.mark.cells(6)]

ENDS_WITHIN_S = 20.0
"""Or as long as it took the run to get there, where that is more: on a machine that is so busy."""
SHARED = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
"""So many test processes share the machine; a test that is not `alone` on it is given as many times the seconds."""
LONG_RESPONSES = (
    "data.max_response_length=400",
    "actor_rollout_ref.rollout.ignore_eos=true",
    "actor_rollout_ref.rollout.max_num_seqs=1",
)
"""One after the other, each of 400 tokens: half a minute of generation."""
LONG_UPDATES = ("actor_rollout_ref.actor.ppo_epochs=10000",)
ONE_RANK = "trainer.n_gpus_per_node=1"
HYBRID = "verl.trainer.main_ppo"
ONE_STEP_OFF = "verl.experimental.one_step_off_policy.main_ppo"
FULLY_ASYNC = "verl.experimental.fully_async_policy.fully_async_main"


def ctrl_c(job):
    """As a terminal does it: to the whole foreground process group."""
    os.killpg(job.driver.pid, signal.SIGINT)


def sigint(job):
    """As `kill -INT` does it: to the driver alone."""
    job.driver.send_signal(signal.SIGINT)


def sigterm(job):
    job.driver.send_signal(signal.SIGTERM)


def impatient(job):
    ctrl_c(job)
    time.sleep(0.3)
    if job.driver.poll() is None:
        ctrl_c(job)


def assert_ends_in_one_line(job, interrupt, seconds=ENDS_WITHIN_S * SHARED):
    before, seconds = job.stderr, max(seconds, job.age_s)
    with within(seconds, "the end of the run"):
        interrupt(job)
        code = job.wait()
        left = job.left(seconds)
        assert left == []
    said = job.stderr.removeprefix(before).splitlines()
    assert code == 130, job.stderr
    assert len(said) == 1, job.stderr
    assert re.fullmatch(r"stopped(; checkpoints, if any, are in .*/out)?", said[0])
    assert "Traceback" not in job.stdout


def assert_no_step_was_completed(job):
    """What was under way was not waited for."""
    metrics = job.output_dir / "metrics.jsonl"
    assert not metrics.exists() or read_metrics(metrics) == []


@pytest.mark.parametrize(
    ("line", "wait_s", "interrupt"),
    [
        ("output in", 1.0, sigint),
        ("starting Ray", 0.1, ctrl_c),
        ("starting Ray", 1.0, sigterm),
        pytest.param("trainer ranks", 2.0, ctrl_c, marks=pytest.mark.alone),
    ],
)
def test_an_interrupt_during_start_up_ends_the_run(start, line, wait_s, interrupt):
    job = start()
    job.wait_for_line(line)
    time.sleep(wait_s)
    assert_ends_in_one_line(job, interrupt)


@pytest.mark.vllm
def test_an_interrupt_while_vllm_starts_ends_it_too(start, warm):
    job = start("actor_rollout_ref.rollout.name=vllm", ONE_RANK, warm=warm)
    job.wait_for(lambda: job.find("VLLM::Engine"), "vLLM's engine core")
    assert_ends_in_one_line(job, ctrl_c)


def test_an_interrupt_during_generation_ends_the_run(start, warm):
    job = start(ONE_RANK, *LONG_RESPONSES, warm=warm)
    job.wait_for((job.output_dir / "sync_reports.jsonl").exists, "the first sync")
    time.sleep(1.0)
    assert_ends_in_one_line(job, sigterm)
    assert_no_step_was_completed(job)


def raylet_of(job):
    (raylet,) = job.find("/raylet/raylet ")
    return raylet


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "stopped"])
def test_a_run_without_its_raylet_ends_with_the_reason_or_when_it_is_told_to(start, warm, number):
    """A stopped one is given time: SIGTERM does not wait for that."""
    job = start(ONE_RANK, *LONG_RESPONSES, warm=warm)
    job.wait_for((job.output_dir / "sync_reports.jsonl").exists, "the first sync")
    raylet = raylet_of(job)
    raylet.send_signal(number)
    if number == signal.SIGSTOP:
        sigterm(job)
    assert job.wait() == (1 if number == signal.SIGKILL else 130)
    assert job.left() == []
    said = job.stderr.splitlines()[-1]
    gone = (
        rf"error: the raylet of this host \(pid {raylet.pid}\) is gone: .*; start the run again, trainer.resume_mode=.*"
    )
    assert re.fullmatch(gone if number == signal.SIGKILL else "stopped.*", said)


@pytest.mark.alone
def test_pressing_ctrl_c_twice_during_training_ends_the_run_as_once_does(start, tmp_path, warm):
    job = start(f"trainer.rollout_data_dir={tmp_path / 'samples'}", *LONG_UPDATES, warm=warm)
    job.wait_for((tmp_path / "samples/1.jsonl").exists, "the first batch")
    time.sleep(1.0)
    assert_ends_in_one_line(job, impatient, ENDS_WITHIN_S)
    assert_no_step_was_completed(job)


@pytest.mark.alone
def test_trainer_ranks_that_die_more_often_than_is_allowed_end_the_run_and_are_named(start, tmp_path, warm):
    job = start(f"trainer.rollout_data_dir={tmp_path / 'samples'}", "trainer.max_restarts=1", *LONG_UPDATES, warm=warm)
    job.wait_for((tmp_path / "samples/1.jsonl").exists, "the first batch")
    time.sleep(1.0)
    job.wait_for(lambda: job.find("ray::trainer.update_actor"), "the first update")[-1].kill()
    job.wait_for_line("the trainer goes on after step 0, from")
    victim = job.wait_for(lambda: job.find("ray::trainer.update_actor"), "the update that is made again")[-1]
    time.sleep(1.0)
    before, seconds = job.stderr, max(ENDS_WITHIN_S, job.age_s)
    with within(seconds, "the end of the run"):
        victim.kill()
        code = job.wait()
        left = job.left(seconds)
    assert code == 1
    assert left == []
    assert "Traceback" not in before
    said = job.stderr.removeprefix(before)
    assert re.match(r"error: trainer rank [01] \(pid", said), said
    assert "trainer.max_restarts=1 within 3600 s allows no other start" in said.splitlines()[0]
    error = re.match(
        r"error: worker group .*rank (\d) \(pid (\d+) on .*\) died during update_actor", said.splitlines()[1]
    )
    assert error, said
    assert int(error[2]) == victim.pid
    assert "wrote their logs to" in said
    assert "Traceback" not in said
    assert "A worker died" not in job.stdout


def test_a_trainer_rank_that_is_stopped_is_replaced_and_the_run_goes_on(start, tmp_path, warm):
    job = start(
        f"trainer.rollout_data_dir={tmp_path / 'samples'}",
        "trainer.total_training_steps=2",
        "actor_rollout_ref.nccl_timeout=15",
        "actor_rollout_ref.actor.ppo_epochs=50",
        warm=warm,
    )
    job.wait_for((tmp_path / "samples/1.jsonl").exists, "the first batch")
    job.wait_for(lambda: job.find("ray::trainer.update_actor"), "the first update")[-1].send_signal(signal.SIGSTOP)
    assert job.wait() == 0, job.stderr
    assert job.left() == []
    assert re.search(rf"trainer rank \d \(pid .*\) does not answer; .* goes on after step {FROM_MEMORY}", job.stderr)


def test_a_rollout_server_that_is_killed_is_replaced_and_the_run_goes_on(start, tmp_path, warm):
    """Once while it generates, once while the trainer trains: then it is missed at the next sync."""
    job = start(
        ONE_RANK,
        f"trainer.rollout_data_dir={tmp_path / 'samples'}",
        "trainer.total_training_steps=2",
        "actor_rollout_ref.actor.ppo_epochs=100",
        "actor_rollout_ref.actor.optim.lr=1e-5",
        "data.max_response_length=128",
        *LONG_RESPONSES[1:],
        warm=warm,
    )
    # Ray's title of an actor at work.
    (server,) = job.wait_for(lambda: job.find("ray::RolloutServer.generate"), "generation")
    server.kill()
    job.wait_for((tmp_path / "samples/1.jsonl").exists, "the first batch")
    (server,) = job.find("ray::RolloutServer")
    server.kill()
    assert job.wait() == 0, job.stderr
    assert job.left() == []
    assert "generating the batch of 8 samples again" in job.stderr
    assert "syncing again" in job.stderr
    metrics = read_metrics(job.output_dir / "metrics.jsonl")
    assert [step["rollout/restarts"] for step in metrics] == [2.0, 2.0]
    assert max(step["training/rollout_probs_diff_mean"] for step in metrics) < 0.02
    reports = [json.loads(line) for line in (job.output_dir / "sync_reports.jsonl").read_text().splitlines()]
    assert [(report["version"], report["outcome"]) for report in reports] == [
        (0, "committed"),
        (1, "aborted"),
        (1, "committed"),
        (2, "committed"),
    ]


@pytest.mark.parametrize("module", [HYBRID, FULLY_ASYNC])
def test_an_agent_loop_worker_that_is_killed_is_replaced_and_the_run_goes_on(start, module, warm):
    job = start(
        ONE_RANK,
        "trainer.placement=separate",
        "checkpoint_engine.backend=gloo",
        "trainer.total_training_steps=1",
        "actor_rollout_ref.rollout.agent.num_workers=1",
        "data.max_response_length=128",
        *LONG_RESPONSES[1:],
        module=module,
        warm=warm,
    )
    (worker,) = job.wait_for(lambda: job.find("ray::AgentLoopWorker.generate_sequences"), "generation")
    worker.kill()
    assert job.wait() == 0, job.stderr
    assert job.left() == []
    assert "agent-loop-worker-0 died or does not answer; starting it again" in job.stderr
    assert re.search("generating .* again", job.stderr)
    assert [step["rollout/restarts"] for step in read_metrics(job.output_dir / "metrics.jsonl")] == [0.0]


def test_a_fully_asynchronous_run_ends_when_its_workers_die_more_often_than_is_allowed(start, warm):
    job = start(
        ONE_RANK,
        "trainer.placement=separate",
        "checkpoint_engine.backend=gloo",
        "actor_rollout_ref.rollout.agent.num_workers=1",
        "actor_rollout_ref.rollout.max_restarts=0",
        *LONG_RESPONSES,
        module=FULLY_ASYNC,
        warm=warm,
    )
    (worker,) = job.wait_for(lambda: job.find("ray::AgentLoopWorker.generate_sequences"), "generation")
    worker.kill()
    assert job.wait() == 1
    assert job.left() == []
    assert "ActorDiedError" in job.stderr
    assert "starting it again" not in job.stderr


@pytest.mark.parametrize(
    ("module", "backend", "how", "seen"),
    [
        (HYBRID, "naive", signal.SIGKILL, "its process is gone"),
        (HYBRID, "gloo", signal.SIGKILL, "its process is gone"),
        (HYBRID, "nixl", signal.SIGSTOP, "not done within 30.0 s"),
        (FULLY_ASYNC, "kimi_ckpt_engine", signal.SIGKILL, "its process is gone"),
    ],
    ids=["naive, killed", "gloo, killed", "nixl, stopped", "fully asynchronous"],
)
def test_a_rollout_node_that_is_lost_is_started_again_after_a_sync_has_failed_and_the_run_goes_on(
    start, module, backend, how, seen, warm
):
    """The engines keep the version that they have until then."""
    within_s = 30 if how == signal.SIGSTOP else 120  # only who is stopped is waited for so long
    job = start(
        ONE_RANK,
        f"checkpoint_engine.backend={backend}",
        f"trainer.placement={'colocated' if backend == 'naive' else 'separate'}",
        f"checkpoint_engine.deadlines.publish_s={within_s}",
        f"checkpoint_engine.deadlines.commit_s={within_s}",
        "checkpoint_engine.retries=0",
        "trainer.total_training_steps=2",
        "actor_rollout_ref.actor.ppo_epochs=50",  # seconds: the first step is not over before
        *(["async_training.trigger_parameter_sync_step=1"] if module == FULLY_ASYNC else []),
        module=module,
        warm=warm,
    )
    job.wait_for((job.output_dir / "sync_reports.jsonl").exists, "the first sync")
    (node,) = job.find("ray::CheckpointEngineWorker")
    node.send_signal(how)
    assert job.wait() == 0, job.stderr
    assert job.left() == []
    assert "node-0 died or does not answer; starting it again" in job.stderr
    reports = [json.loads(line) for line in (job.output_dir / "sync_reports.jsonl").read_text().splitlines()]
    outcomes = [(report["version"], report["outcome"]) for report in reports]
    assert outcomes[:2] == [(0, "committed"), (1, "aborted")]
    assert outcomes[2:] in ([(1, "committed"), (2, "committed")], [(2, "committed")])
    assert seen in reports[1]["error"]
    metrics = read_metrics(job.output_dir / "metrics.jsonl")
    assert max(step["training/rollout_probs_diff_mean"] for step in metrics) < 0.02


@pytest.mark.parametrize("module", [HYBRID, ONE_STEP_OFF, FULLY_ASYNC])
def test_the_trainer_brings_weights_again_when_the_only_node_and_the_only_engine_have_died(start, module, warm):
    """The engine generates when it dies: nobody looks after the node before the next sync."""
    job = start(
        ONE_RANK,
        "trainer.placement=separate",
        "checkpoint_engine.backend=gloo",
        "data.max_response_length=128",
        *LONG_RESPONSES[1:],
        "trainer.total_training_steps=2",
        module=module,
        warm=warm,
    )
    job.wait_for(lambda: job.find("ray::RolloutServer.generate"), "generation")
    job.find("ray::CheckpointEngineWorker")[0].kill()
    job.find("ray::RolloutServer")[0].kill()
    assert job.wait() == 0, job.stderr
    assert job.left() == []
    assert "no rollout engine is in service; syncing version 0 from the trainer" in job.stderr
    metrics = read_metrics(job.output_dir / "metrics.jsonl")
    assert [step["step"] for step in metrics] == [1, 2]
    assert max(step["training/rollout_probs_diff_mean"] for step in metrics) < 0.02


@pytest.mark.parametrize("module", [ONE_STEP_OFF, FULLY_ASYNC])
def test_an_interrupt_ends_a_run_whose_engines_generate_while_it_trains(start, module, warm):
    job = start(ONE_RANK, *LONG_RESPONSES, module=module, warm=warm)
    job.wait_for((job.output_dir / "sync_reports.jsonl").exists, "the first sync")
    time.sleep(1.0)
    assert_ends_in_one_line(job, ctrl_c)
    assert_no_step_was_completed(job)


def test_a_fully_asynchronous_run_outlives_an_engine_and_its_rollouter(start, warm):
    job = start(
        ONE_RANK,
        *LONG_RESPONSES,
        "data.max_response_length=32",
        "trainer.total_training_steps=4",
        module=FULLY_ASYNC,
        warm=warm,
    )
    metrics = job.output_dir / "metrics.jsonl"
    job.wait_for((job.output_dir / "sync_reports.jsonl").exists, "the first sync")
    job.find("ray::RolloutServer")[0].kill()
    job.wait_for(
        lambda: metrics.exists() and any(step["rollout/restarts"] == 1 for step in read_metrics(metrics)),
        "a step after the engine was restarted",
    )
    job.find("ray::Rollouter")[0].kill()
    assert job.wait() == 0, job.stderr
    assert job.left() == []
    assert "Traceback" not in job.stderr
    told = [line for line in job.stderr.splitlines() if "the run goes on with step" in line]
    assert len(told) == 1
    assert told[0].startswith("warning: rollouter (pid ")
    assert len(read_metrics(metrics)) == 4


def test_a_fully_asynchronous_run_whose_queue_may_not_be_started_again_ends_and_names_it(start, warm):
    job = start(
        ONE_RANK,
        *LONG_RESPONSES,
        "data.max_response_length=32",
        "trainer.max_restarts=0",
        module=FULLY_ASYNC,
        warm=warm,
    )
    metrics = job.output_dir / "metrics.jsonl"
    job.wait_for(lambda: metrics.exists() and read_metrics(metrics), "the first step")
    (queue,) = job.find("ray::MessageQueue")
    before, seconds = job.stderr, max(ENDS_WITHIN_S * SHARED, job.age_s)
    with within(seconds, "the end of the run"):
        queue.kill()
        code = job.wait()
        left = job.left(seconds)
    assert code == 1, job.stderr
    assert left == []
    first = job.stderr.removeprefix(before).splitlines()[0]
    assert re.match(r"error: queue \(pid .*\) died; trainer.max_restarts=0 within 3600 s allows no other start", first)
    reports = [json.loads(line) for line in (job.output_dir / "sync_reports.jsonl").read_text().splitlines()]
    assert reports[-1]["outcome"] == "committed"
