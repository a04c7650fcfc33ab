"""Runs whose samples follow from their prompts and the weights, so that two of them can be compared to the last bit."""

from __future__ import annotations

import hashlib
import re
from pathlib import Path

from verl.utils.builtin import make_tiny_model
from verl.utils.tracking import read_metrics

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
        seed = zlib.crc32(repr(sample["raw_prompt"]).encode())
        return await super().run(sampling_params | {"seed": seed}, **sample)
"""
MEASURED = re.compile(r"timing|perf/|checkpoint/|trainer/|memory/|_s$|_s/|gbytes|checkpoint_engine/|training/attempt")
"""Metrics that differ from run to run."""


def make_files(directory: Path) -> Path:
    """What such runs need, a model in `llama` included; `directory`."""
    (directory / "reward.py").write_text(REWARD)
    (directory / "loop.py").write_text(LOOP)
    (directory / "loops.yaml").write_text(f"- {{name: seeded, _target_: '{directory / 'loop.py'}:Seeded'}}\n")
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


def overrides(files: Path, steps: int) -> list[str]:
    """Of runs with `make_files`, whose last step is saved. All that a trainer's state consists of is in use."""
    return [
        f"custom_reward_function.path={files / 'reward.py'}",
        *STATEFUL,
        "actor_rollout_ref.actor.shuffle=true",
        "actor_rollout_ref.actor.checkpoint.save_contents=[model,optimizer,extra,hf_model]",
        f"actor_rollout_ref.rollout.agent.agent_loop_config_path={files / 'loops.yaml'}",
        "actor_rollout_ref.rollout.agent.default_agent_loop=seeded",
        "actor_rollout_ref.rollout.max_num_seqs=1",  # what is beside a sample rounds it differently
        "actor_rollout_ref.rollout.n=1",
        f"trainer.total_training_steps={steps}",
        f"trainer.save_freq={steps}",
        "trainer.max_restarts=5",
    ]


def metrics_of(output_dir: Path) -> dict[int, dict[str, float]]:
    """By step, without what differs from run to run."""
    return {
        record["step"]: {name: value for name, value in record.items() if not MEASURED.search(name)}
        for record in read_metrics(output_dir / "metrics.jsonl")
    }


def weights_of(output_dir: Path, step: int) -> str:
    """A digest of what a checkpoint's `hf_model` holds."""
    digest, paths = hashlib.sha256(), sorted((output_dir / f"global_step_{step}").rglob("*.safetensors"))
    assert paths
    for path in paths:
        digest.update(path.read_bytes())
    return digest.hexdigest()
