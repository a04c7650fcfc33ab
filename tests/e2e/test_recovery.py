"""Runs whose trainer ranks are killed: they end as those whose are not, to the last bit."""

from __future__ import annotations

import json
import logging
import re
import shutil
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.e2e import faults, seeded
from tests.e2e.job import in_process
from verl.experimental.one_step_off_policy.trainer import OneStepOffPolicyTrainer
from verl.trainer.fleet.trainer_ranks import PARTS
from verl.utils.tracking import read_metrics

pytestmark = pytest.mark.e2e

STEPS = 5


@dataclass(frozen=True)
class Run:
    directory: Path
    said: list[str]

    def require_same_as(self, other: Run) -> None:
        seeded.require_equal(other.directory / "out", self.directory / "out")

    @property
    def restarts(self) -> list[str]:
        return [line for line in self.said if "the trainer goes on" in line]

    @property
    def attempts(self) -> list[float]:
        return [record["training/attempt"] for record in read_metrics(self.directory / "out/metrics.jsonl")]

    @property
    def reports(self) -> list[tuple[int, int, str]]:
        lines = (self.directory / "out/sync_reports.jsonl").read_text().splitlines()
        return [(one["version"], one["attempt"], one["outcome"]) for one in map(json.loads, lines)]


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    return seeded.make_files(tmp_path_factory.mktemp("files"))


def train(files, directory, *overrides, planned=(), **how):
    """A run with or without planned deaths."""
    directory.mkdir(exist_ok=True)
    model = directory / "model"
    shutil.copytree(files / "llama", model)
    faults.plan(model, planned)
    records: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: records.append(record.getMessage())
    logging.getLogger("verl").addHandler(handler)
    try:
        in_process(
            directory,
            f"actor_rollout_ref.model.path={model}",
            f"actor_rollout_ref.model.external_lib={faults.MODULE}",
            *seeded.overrides(files, directory / "out", STEPS),
            "data.train_batch_size=8",
            *overrides,
            **how,
        )
    finally:
        logging.getLogger("verl").removeHandler(handler)
    assert not list((model / faults.DIRECTORY).iterdir()), "nobody died of these"
    return Run(directory, records)


@pytest.fixture(scope="module")
def undisturbed(ray_cluster, files, tmp_path_factory):
    return train(files, tmp_path_factory.mktemp("undisturbed"))


def test_deaths_in_every_phase_change_nothing_when_the_state_is_in_memory(undisturbed, files, tmp_path):
    planned = [
        (1, 1, faults.LOG_PROBS),
        (2, 0, faults.UPDATE),
        (3, 1, faults.PUBLISH),
        (4, 0, faults.UPDATE),
        (4, 1, faults.UPDATE),
        (5, 0, faults.SAVE),
    ]
    died = train(files, tmp_path, planned=planned)
    died.require_same_as(undisturbed)
    assert died.attempts == [1, 2, 3, 4, 5]
    assert len(died.restarts) == 5
    for record in read_metrics(tmp_path / "out/metrics.jsonl"):
        parts = [record[f"recovery/{part}_s"] for part in PARTS]
        assert min(record["recovery/processes_s"], record["recovery/models_s"], record["recovery/state_s"]) > 0
        assert sum(parts) < record["recovery/step_s"], "the step is complete after all of them"
    for told in died.restarts:
        assert re.fullmatch(
            r"trainer rank \d \(pid \d+ on .*\) died.*; engines, agent loops and reward workers are kept; "
            rf"the trainer goes on after step {faults.FROM_MEMORY}, after \d+\.\d s \(noticed \d.*, state \d+\.\d\)",
            told,
        )
    committed = [(version, attempt) for version, attempt, outcome in died.reports if outcome == "committed"]
    assert [version for version, _ in committed] == list(range(STEPS + 1)), "the engines were given each version once"


@pytest.mark.cells(2)
def test_without_memory_the_steps_since_the_last_checkpoint_are_repeated_with_the_same_numbers(
    undisturbed, files, tmp_path
):
    """First there is no checkpoint: the run begins again."""
    died = train(
        files,
        tmp_path,
        "trainer.memory_checkpoint=off",
        "trainer.save_freq=2",
        planned=[(2, 0, faults.UPDATE), (4, 1, faults.UPDATE)],
    )
    assert [told.split("; ")[2].rsplit(", after ", 1)[0] for told in died.restarts] == [
        "the trainer goes on after step 0, from the beginning",
        f"the trainer goes on after step 2, from {tmp_path}/out/global_step_2",
    ]
    assert died.attempts == [1, 1, 2, 2, 2]
    died.require_same_as(undisturbed)
    committed = [(version, attempt) for version, attempt, outcome in died.reports if outcome == "committed"]
    assert committed == [(0, 1), (1, 1), (2, 2), (3, 2), (4, 2), (5, 2)], "each version that counts is told once"


@pytest.mark.cells(2)
def test_the_critic_comes_back_too_and_so_does_fsdp1_and_a_save_in_the_background(ray_cluster, files, tmp_path):
    overrides = (
        "actor_rollout_ref.actor.strategy=fsdp",
        "algorithm.adv_estimator=gae",
        "critic.ppo_mini_batch_size=4",
        "critic.shuffle=true",
        "critic.optim.lr=1e-3",
    )
    whole = train(files, tmp_path / "whole", *overrides)
    died = train(
        files,
        tmp_path / "died",
        *overrides,
        "actor_rollout_ref.actor.checkpoint.async_save=true",
        "critic.checkpoint.async_save=true",
        "trainer.save_freq=1",
        planned=[(2, 0, faults.WRITE), (3, 1, faults.REMEMBER)],
    )
    assert len(died.restarts) == 2
    died.require_same_as(whole)
    unsaved = [int(told.split()[1]) for told in died.said if " is not saved: " in told]
    assert unsaved == [2], "the checkpoint that was being written; the one before it stays"
    saved = {path.name for path in (tmp_path / "died/out").glob("*global_step_*")}
    assert saved == {f"global_step_{step}" for step in (1, 3, 4, 5)}
    last = list(read_metrics(tmp_path / "died/out/metrics.jsonl"))[-1]
    assert {f"trainer/slowness/{phase}" for phase in ("old_log_prob", "values", "update_critic", "update_actor")} < set(
        last
    )
    assert last["checkpoint/blocked_s"] > 0


@pytest.mark.cells(2)
def test_ranks_of_megatron_with_moments_of_their_own_and_a_critic_come_back_too(ray_cluster, files, tmp_path):
    """Each of two data-parallel ranks has the moments of a part of the tensors."""
    overrides = (
        "actor_rollout_ref.actor.strategy=megatron",
        "actor_rollout_ref.actor.megatron.use_distributed_optimizer=true",
        "algorithm.adv_estimator=gae",
        "critic.strategy=megatron",
        "critic.ppo_mini_batch_size=4",
        "critic.shuffle=true",
        "critic.optim.lr=1e-3",
    )
    whole = train(files, tmp_path / "whole", *overrides)
    planned = [(2, 0, faults.UPDATE), (3, 1, faults.REMEMBER), (4, 1, faults.UPDATE), (4, 0, faults.PUBLISH)]
    died = train(files, tmp_path / "died", *overrides, planned=planned)
    assert len(died.restarts) == 4
    assert all(", from memory, " in told for told in died.restarts)
    died.require_same_as(whole)


@pytest.mark.cells(2)
def test_what_is_generated_one_step_ahead_is_kept(ray_cluster, files, tmp_path):
    overrides = ("trainer.placement=separate", "checkpoint_engine.backend=gloo")
    how = {"trainer_class": OneStepOffPolicyTrainer}
    whole = train(files, tmp_path / "whole", *overrides, **how)
    died = train(files, tmp_path / "died", *overrides, planned=[(4, 0, faults.PUBLISH)], **how)
    assert len(died.restarts) == 1
    died.require_same_as(whole)


@pytest.mark.cells(2)
def test_a_batch_that_was_generated_ahead_is_in_the_checkpoint_and_learned_from_after_it(ray_cluster, files, tmp_path):
    """No engine has the version that generated it any more: after the loss of all ranks, and after a kill."""
    overrides = ("trainer.placement=separate", "checkpoint_engine.backend=gloo", "trainer.save_freq=2")
    how = {"trainer_class": OneStepOffPolicyTrainer}
    whole = train(files, tmp_path / "whole", *overrides, **how)
    overrides = (*overrides, "trainer.memory_checkpoint=off")
    died = train(files, tmp_path / "died", *overrides, planned=[(4, 0, faults.UPDATE)], **how)
    assert len(died.restarts) == 1
    died.require_same_as(whole)
    killed = tmp_path / "killed/out"
    shutil.copytree(whole.directory / "out", killed)
    for step in (4, 5):
        shutil.rmtree(killed / f"global_step_{step}")
        (killed / f"samples/{step}.jsonl").unlink()
    (killed / "latest_checkpointed_iteration.txt").write_text("2")
    train(files, tmp_path / "killed", *overrides, **how).require_same_as(whole)
