"""Runs whose samples follow from their prompts and the weights, so that two of them can be compared to the last bit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from click.testing import CliRunner

from verl.cli.main import cli
from verl.utils.builtin import make_tiny_model
from verl.utils.measured import is_measured
from verl.utils.tracking import read_metrics

REWARD = """
def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    # Says something about any text, so that there is always something to learn.
    return sum(solution_str.encode()) % 7 / 7
"""


def make_files(directory: Path) -> Path:
    """What such runs need, a model in `llama` included; `directory`."""
    (directory / "reward.py").write_text(REWARD)
    make_tiny_model(directory / "llama", "llama")
    return directory


STATEFUL = (
    "algorithm.adv_estimator=reinforce_plus_plus",
    "algorithm.use_kl_in_reward=true",
    "algorithm.kl_ctrl.type=adaptive",
    "algorithm.kl_ctrl.kl_coef=0.1",
    "algorithm.kl_ctrl.horizon=100",
    "actor_rollout_ref.actor.optim.lr=1e-3",
    "actor_rollout_ref.actor.optim.lr_scheduler_type=cosine",
)
"""A training state with more in it than weights and moments: a KL controller and a schedule."""


def overrides(files: Path, output_dir: Path, steps: int) -> list[str]:
    """Of runs with `make_files`, whose last step is saved. All that a trainer's state consists of is in use."""
    return [
        f"custom_reward_function.path={files / 'reward.py'}",
        *STATEFUL,
        "actor_rollout_ref.actor.shuffle=true",
        "actor_rollout_ref.actor.checkpoint.save_contents=[model,optimizer,extra,hf_model]",
        "actor_rollout_ref.rollout.max_num_seqs=1",  # what is beside a sample rounds it differently
        "actor_rollout_ref.rollout.n=1",
        "trainer.max_restarts=5",
        *kept(output_dir, steps),
    ]


def kept(output_dir: Path, steps: int) -> list[str]:
    """Of a run that another one is compared with: all that it computes follows from its settings, and is kept."""
    return [
        "trainer.full_determinism=true",
        f"trainer.rollout_data_dir={output_dir / 'samples'}",
        f"trainer.validation_data_dir={output_dir / 'validation'}",
        f"trainer.total_training_steps={steps}",
        f"trainer.save_freq={steps}",
    ]


def require_equal(*runs: Path) -> dict[str, Any]:
    """That `verl-sync diff` finds two runs equal, of which it saw samples and a checkpoint. How much it compared."""
    done = CliRunner().invoke(cli, ["diff", "--json", *map(str, runs)])
    assert done.exit_code in (0, 1), done.output
    found: dict[str, Any] = json.loads(done.output)
    assert found["equal"], (found["step"], found["differences"][:5])
    compared: dict[str, Any] = found["compared"]
    assert min(compared["metrics"], compared["samples"], compared["tensors"]) > 0
    return compared


def samples_of(output_dir: Path, step: int) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (output_dir / f"samples/{step}.jsonl").read_text().splitlines()]


def metrics_of(output_dir: Path) -> dict[int, dict[str, float]]:
    """By step, without what differs from run to run."""
    return {
        record["step"]: {name: value for name, value in record.items() if not is_measured(name)}
        for record in read_metrics(output_dir / "metrics.jsonl")
    }
