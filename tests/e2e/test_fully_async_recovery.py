"""Fully asynchronous runs whose trainer ranks, rollouter or queue are killed: every prompt is trained on once."""

from __future__ import annotations

import json
import os
import re
import signal
import threading
import time
from collections import Counter

import pytest
import ray

from tests.e2e import faults, seeded
from tests.e2e.test_recovery import STEPS, files, train  # noqa: F401 - a fixture
from verl.experimental.fully_async_policy import fully_async_main
from verl.experimental.fully_async_policy.supply import SupplyLost
from verl.experimental.fully_async_policy.trainer import FullyAsyncTrainer
from verl.utils.tracking import read_metrics

pytestmark = [pytest.mark.e2e, pytest.mark.cells(6)]

PROMPTS = 8
"""Of a step."""
WHERE = {"config_path": fully_async_main.CONFIG_DIR, "config_name": fully_async_main.CONFIG_NAME}
OVERRIDES = (
    "trainer.full_determinism=false",  # it is refused here: what arrives first decides
    "checkpoint_engine.backend=gloo",
    "async_training.require_batches=2",
    "async_training.trigger_parameter_sync_step=1",
    "algorithm.rollout_correction.rollout_is=null",
    "actor_rollout_ref.rollout.ignore_eos=true",
    "data.train_max_samples=64",
)
ON_POLICY = (*OVERRIDES, "async_training.staleness_threshold=0")
STALE = (
    *OVERRIDES,
    "async_training.staleness_threshold=1",
    "data.max_response_length=40",
    "trainer.n_gpus_per_node=1",
    "trainer.save_freq=2",
)

LOOP = """
import zlib
from verl.experimental.agent_loop.single_turn import SingleTurnAgentLoop

class Seeded(SingleTurnAgentLoop):
    # On policy, what a step learns from follows from the prompts if samples do.
    async def run(self, sampling_params, **sample):
        seed = zlib.crc32(repr(sample["raw_prompt"]).encode())
        return await super().run(sampling_params | {"seed": seed}, **sample)
"""


class Killing(FullyAsyncTrainer):
    """Kills `planned[step, what]`, `rollouter` or `queue`, by that signal, when the trainer is about to do that."""

    planned: dict[tuple[int, str], tuple[str, signal.Signals]] = {}

    def _may_kill(self, step, what, later_s=0.0):
        name, how = self.planned.pop((step, what), (None, None))
        if name is not None:
            part = getattr(self.supply, f"_{name}")
            kill = (int(re.match(r"pid (\d+)", part.where)[1]), how)
            if later_s:
                threading.Timer(later_s, os.kill, kill).start()
            else:
                os.kill(*kill)

    def take(self, now):
        self._may_kill(now.number, "take", later_s=0.05)
        return super().take(now)

    def learn(self, batch, now):
        self._may_kill(now.number, "learn")
        return super().learn(batch, now)

    def synchronise(self, now):
        self._may_kill(now.number, "sync")
        super().synchronise(now)
        self._may_kill(now.number, "stage")

    def save_checkpoint(self, step, prompts_state):
        super().save_checkpoint(step, prompts_state)
        self._may_kill(step, "saved")

    def rollouter_state(self):
        self._may_kill(self.supply.step, "save")
        return super().rollouter_state()


class FindsThemMeanwhile(FullyAsyncTrainer):
    """Queue and rollouter die while samples are waited for. What the trainer does meanwhile, such as to end a sync,
    finds that before who waits does."""

    def _taken(self, count, now):
        parts = [self.supply._queue, self.supply._rollouter] if now.number == 1 else []

        def meanwhile():
            if parts:
                while parts:
                    os.kill(int(re.match(r"pid (\d+)", parts.pop().where)[1]), signal.SIGKILL)
                self.supply.state()

        return self.supply.take(count, meanwhile)


class LosesEngineAndQueue(FullyAsyncTrainer):
    """The engine dies before a sync, and when that has found it, the queue. Who generates hears late of another one."""

    lost_queue = False

    def synchronise(self, now):
        loses = now.number == 2
        for server in self.cluster.server_handles if loses else ():
            ray.kill(server)
        super().synchronise(now)
        if loses:
            self.end_sync(now, version=now.number)

    def _sync_again(self, version):
        report = super()._sync_again(version)
        if not self.lost_queue:
            self.lost_queue = True
            os.kill(int(re.match(r"pid (\d+)", self.supply._queue.where)[1]), signal.SIGKILL)
        return report

    def follow_replicas(self):
        time.sleep(1.0)
        super().follow_replicas()


def fully_async(files, directory, *overrides, planned=(), kills=(), **how):  # noqa: F811 - the fixture
    Killing.planned = dict(kills)
    directory.mkdir(exist_ok=True)
    (directory / "loop.py").write_text(LOOP)
    (directory / "loops.yaml").write_text(f"- {{name: seeded, _target_: '{directory / 'loop.py'}:Seeded'}}\n")
    own = (
        f"actor_rollout_ref.rollout.agent.agent_loop_config_path={directory / 'loops.yaml'}",
        "actor_rollout_ref.rollout.agent.default_agent_loop=seeded",
        f"trainer.rollout_data_dir={directory / 'samples'}",
    )
    run = train(files, directory, *own, *overrides, planned=planned, trainer_class=Killing, **WHERE, **how)
    assert not Killing.planned, "nobody was killed"
    return run


def require_same(died, undisturbed):
    """The same metrics, but for those of the machine, samples and exported weights. Positions of queues may differ."""
    expected = seeded.metrics_of(undisturbed.directory / "out")
    for step, metrics in seeded.metrics_of(died.directory / "out").items():
        differing = {name: (value, expected[step].get(name)) for name, value in metrics.items()}
        assert {name: both for name, both in differing.items() if both[0] != both[1]} == {}
    for step in range(1, STEPS + 1):
        assert responses(died, step) == responses(undisturbed, step)
    assert weights(died) == weights(undisturbed)


def responses(run, step):
    rows = map(json.loads, (run.directory / f"samples/{step}.jsonl").read_text().splitlines())
    return [(row["index"], row["response_ids"]) for row in rows]


def weights(run):
    """Of the last step, as exported."""
    paths = sorted((run.directory / f"out/global_step_{STEPS}").rglob("*.safetensors"))
    assert paths
    return [path.read_bytes() for path in paths]


def assert_every_prompt_is_trained_once(run):
    """None lost, none twice; nor is any sample newer than its trainer, or older than the bound."""
    rows = {}
    for step in range(1, STEPS + 1):
        lines = (run.directory / f"samples/{step}.jsonl").read_text().splitlines()
        rows[step] = [json.loads(line) for line in lines]
    uids = Counter(uid for of_step in rows.values() for uid in {row["uid"] for row in of_step})
    assert set(uids.values()) == {1}
    assert len(uids) == STEPS * PROMPTS
    asked = sorted(row["index"] for of_step in rows.values() for row in of_step)
    assert asked == sorted(set(asked))
    assert len(asked) == STEPS * PROMPTS  # all that is drawn is trained on: there is nothing else to lose
    for metrics in read_metrics(run.directory / "out/metrics.jsonl"):
        assert 0 <= metrics["training/staleness/min"] <= metrics["training/staleness/max"] <= 2


@pytest.fixture(scope="module")
def undisturbed(ray_cluster, files, tmp_path_factory):  # noqa: F811
    return fully_async(files, tmp_path_factory.mktemp("undisturbed"), *ON_POLICY)


def test_deaths_of_ranks_in_every_phase_change_nothing(undisturbed, files, tmp_path):  # noqa: F811
    planned = [
        (1, 1, faults.LOG_PROBS),
        (2, 0, faults.UPDATE),
        (3, 1, faults.PUBLISH),
        (4, 1, faults.REMEMBER),
        (5, 0, faults.SAVE),
    ]
    died = fully_async(files, tmp_path, *ON_POLICY, planned=planned)
    require_same(died, undisturbed)
    assert len(died.restarts) == 5
    for told in died.restarts:
        assert re.fullmatch(
            r"trainer rank \d \(pid \d+ on .*\) died.*; engines, agent loops, reward workers, rollouter and queue are "
            rf"kept; the trainer goes on after step {faults.FROM_MEMORY}, after \d+\.\d s \(noticed \d.*, "
            r"state \d+\.\d\)",
            told,
        )
    committed = [version for version, _, outcome in died.reports if outcome == "committed"]
    assert committed == list(range(STEPS + 1)), "no engine was given a version of a step that was undone"
    assert_every_prompt_is_trained_once(died)


def test_without_memory_it_goes_back_and_repeats_the_steps_with_the_same_numbers(undisturbed, files, tmp_path):  # noqa: F811
    died = fully_async(
        files,
        tmp_path,
        *ON_POLICY,
        "trainer.memory_checkpoint=off",
        "trainer.save_freq=2",
        planned=[(2, 0, faults.UPDATE), (4, 1, faults.UPDATE)],
    )
    assert [told.split("; ")[2].rsplit(", after ", 1)[0] for told in died.restarts] == [
        "the trainer goes on after step 0, from the beginning",
        f"the trainer goes on after step 2, from {tmp_path}/out/global_step_2",
    ]
    require_same(died, undisturbed)
    assert_every_prompt_is_trained_once(died)
    metrics = read_metrics(died.directory / "out/metrics.jsonl")
    assert [one["step"] for one in metrics if one.get("rollout/kept_tokens")] == [1, 3], "both had been generated"


@pytest.mark.parametrize("partial", [True, False], ids=["interrupting", "draining"])
def test_a_rollouter_and_a_queue_that_die_in_any_phase_lose_nothing(ray_cluster, files, tmp_path, partial):  # noqa: F811
    kills = {
        (1, "learn"): ("rollouter", signal.SIGKILL),
        (2, "take"): ("queue", signal.SIGKILL),
        (2, "save"): ("rollouter", signal.SIGKILL),
        (3, "sync"): ("queue", signal.SIGKILL),
        (4, "stage"): ("rollouter", signal.SIGKILL),
        (4, "saved"): ("queue", signal.SIGKILL),
    }
    run = fully_async(
        files,
        tmp_path,
        *STALE,
        f"async_training.partial_rollout={str(partial).lower()}",
        "trainer.max_restarts=10",
        kills=kills,
    )
    told = [line for line in run.said if "the run goes on with step" in line]
    assert 5 <= len(told) <= 6, told  # two of them may be found at once
    for line in told:
        assert re.fullmatch(
            r"(rollouter|queue) \(pid \d+ on .*\) died.*; trainer, engines and agent loops are kept, and \d+ samples "
            r"in the queue; the run goes on with step \d, after \d+\.\d s",
            line,
        )
    assert_every_prompt_is_trained_once(run)


def test_a_queue_that_is_replaced_while_it_is_waited_for_is_not_waited_for_any_more(ray_cluster, files, tmp_path):  # noqa: F811
    samples = f"trainer.rollout_data_dir={tmp_path / 'samples'}"
    run = train(files, tmp_path, samples, *STALE, trainer_class=FindsThemMeanwhile, **WHERE)
    (told,) = [line for line in run.said if "the run goes on with step" in line]
    assert re.match(r"rollouter \(pid \d+ on .*\) died.* and queue \(pid \d+ on .*\) died", told)
    assert_every_prompt_is_trained_once(run)


def test_a_queue_that_dies_after_an_engine_was_started_again_lets_nobody_ask_the_dead_one(ray_cluster, files, tmp_path):  # noqa: F811
    samples = f"trainer.rollout_data_dir={tmp_path / 'samples'}"
    run = train(files, tmp_path, samples, *STALE, trainer_class=LosesEngineAndQueue, **WHERE)
    assert any(line.startswith("syncing again after") for line in run.said)
    assert any(re.match(r"queue \(pid \d+ on .*\) died", line) for line in run.said)
    assert_every_prompt_is_trained_once(run)


def test_one_that_is_stopped_is_found_too_and_so_are_both_at_once(ray_cluster, files, tmp_path):  # noqa: F811
    kills = {
        (2, "take"): ("rollouter", signal.SIGSTOP),
        (3, "take"): ("rollouter", signal.SIGKILL),
        (3, "learn"): ("queue", signal.SIGSTOP),
    }
    run = fully_async(files, tmp_path, *STALE, kills=kills)
    assert any("does not answer; trainer" in line for line in run.said)
    assert_every_prompt_is_trained_once(run)


def test_more_deaths_than_are_allowed_end_the_run_and_name_who_died(ray_cluster, files, tmp_path):  # noqa: F811
    kills = {(1, "learn"): ("rollouter", signal.SIGKILL), (2, "learn"): ("queue", signal.SIGKILL)}
    with pytest.raises(SupplyLost, match=r"queue \(pid .* died; trainer.max_restarts=1 within 3600 s allows no other"):
        fully_async(files, tmp_path, *STALE, "trainer.max_restarts=1", kills=kills)
