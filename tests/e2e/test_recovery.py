"""Runs whose trainer ranks are killed: they end as those whose are not, to the last bit."""

from __future__ import annotations

import hashlib
import json
import logging
import re
import shutil
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.e2e import faults
from tests.e2e.job import in_process
from verl.utils.builtin import make_tiny_model
from verl.utils.tracking import read_metrics

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]

STEPS = 5
REWARD = """
def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    # Says something about any text, so that there is always something to learn.
    return sum(solution_str.encode()) % 7 / 7
"""
LOOP = """
import zlib
from verl.experimental.agent_loop.single_turn import SingleTurnAgentLoop

class Seeded(SingleTurnAgentLoop):
    # Engines have one generator for all requests, which come in any order.
    async def run(self, sampling_params, **sample):
        seed = zlib.crc32(sample["raw_prompt"][-1]["content"].encode())
        return await super().run(sampling_params | {"seed": seed}, **sample)
"""
MEASURED = re.compile(r"timing|perf/|_s$|_s/|gbytes|checkpoint_engine/|training/attempt")
"""Metrics that differ from run to run."""


@dataclass(frozen=True)
class Run:
    directory: Path
    said: str

    @property
    def metrics(self) -> dict[int, dict[str, float]]:
        """By step, without what differs from run to run."""
        return {
            record["step"]: {name: value for name, value in record.items() if not MEASURED.search(name)}
            for record in read_metrics(self.directory / "out/metrics.jsonl")
        }

    @property
    def attempts(self) -> list[float]:
        return [record["training/attempt"] for record in read_metrics(self.directory / "out/metrics.jsonl")]

    @property
    def weights(self) -> str:
        """Of what a rank's optimizer steps make, after the last step."""
        digest = hashlib.sha256()
        for path in sorted((self.directory / f"out/global_step_{STEPS}").rglob("*.safetensors")):
            digest.update(path.read_bytes())
        return digest.hexdigest()

    @property
    def reports(self) -> list[tuple[int, int, str]]:
        lines = (self.directory / "out/sync_reports.jsonl").read_text().splitlines()
        return [(one["version"], one["attempt"], one["outcome"]) for one in map(json.loads, lines)]


@pytest.fixture
def run(ray_cluster, tmp_path, caplog):
    """Trains a small model, with or without planned deaths."""
    (tmp_path / "reward.py").write_text(REWARD)
    (tmp_path / "loop.py").write_text(LOOP)
    (tmp_path / "loops.yaml").write_text(f"- {{name: seeded, _target_: '{tmp_path / 'loop.py'}:Seeded'}}\n")
    model = make_tiny_model(tmp_path / "llama", "llama")

    def run_it(name, *overrides, planned=()):
        shutil.copytree(model, tmp_path / f"model-{name}")
        faults.plan(tmp_path / f"model-{name}", planned)
        caplog.clear()
        with caplog.at_level(logging.INFO):
            in_process(
                tmp_path / name,
                f"actor_rollout_ref.model.path={tmp_path / f'model-{name}'}",
                f"actor_rollout_ref.model.external_lib={faults.MODULE}",
                f"custom_reward_function.path={tmp_path / 'reward.py'}",
                "algorithm.adv_estimator=reinforce_plus_plus",
                "algorithm.use_kl_in_reward=true",
                "algorithm.kl_ctrl.type=adaptive",
                "algorithm.kl_ctrl.kl_coef=0.1",
                "algorithm.kl_ctrl.horizon=100",
                "actor_rollout_ref.actor.optim.lr=1e-3",
                "actor_rollout_ref.actor.optim.lr_scheduler_type=cosine",
                "actor_rollout_ref.actor.shuffle=true",
                "actor_rollout_ref.actor.checkpoint.save_contents=[model,optimizer,extra,hf_model]",
                f"actor_rollout_ref.rollout.agent.agent_loop_config_path={tmp_path / 'loops.yaml'}",
                "actor_rollout_ref.rollout.agent.default_agent_loop=seeded",
                "actor_rollout_ref.rollout.max_num_seqs=1",  # what is beside a sample rounds it differently
                "actor_rollout_ref.rollout.n=1",
                "data.train_batch_size=8",
                f"trainer.rollout_data_dir={tmp_path / name / 'samples'}",
                f"trainer.total_training_steps={STEPS}",
                f"trainer.save_freq={STEPS}",
                "trainer.max_restarts=10",
                *overrides,
            )
        assert not list((tmp_path / f"model-{name}" / faults.DIRECTORY).iterdir()), "nobody died of these"
        return Run(tmp_path / name, caplog.text)

    return run_it


def test_two_undisturbed_runs_are_equal(run):
    first, second = run("first"), run("second")
    assert first.metrics == second.metrics
    assert first.weights == second.weights


def test_deaths_in_every_phase_change_nothing_when_the_state_is_in_memory(run):
    whole = run("whole")
    died = run(
        "died",
        planned=[
            (1, 1, faults.LOG_PROBS),
            (2, 0, faults.UPDATE),
            (3, 1, faults.PUBLISH),
            (4, 0, faults.UPDATE),
            (4, 1, faults.UPDATE),
            (5, 0, faults.SAVE),
        ],
    )
    assert died.metrics == whole.metrics
    assert died.weights == whole.weights
