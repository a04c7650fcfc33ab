"""Launches of verl's own scripts, two steps each, with sizes, model and data replaced (tests/e2e/launches)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.e2e.launches import argv_of
from tests.e2e.test_training import LOOP, Run
from tests.workers.reward_model import head
from verl.experimental.fully_async_policy import fully_async_main
from verl.experimental.one_step_off_policy import main_ppo as one_step_off
from verl.trainer import main_ppo
from verl.trainer.config.cli import run_hydra
from verl.trainer.ppo.run import train
from verl.utils.builtin import make_tiny_model

pytestmark = [pytest.mark.e2e, pytest.mark.vllm, pytest.mark.cells(3)]  # each passes --check every day

Metrics = Mapping[str, float]


@dataclass(frozen=True, kw_only=True)
class Launch:
    kind: str
    """Its file, without suffix."""
    loop: str = main_ppo.HYBRID
    where: Mapping[str, object] = field(default_factory=dict)
    own: Mapping[str, str] = field(default_factory=dict)
    """Of the user, beside model and data; `{files}` is the directory of the user's files."""
    shows: Callable[[Metrics], bool]
    """Of the last step: what makes it this kind of run."""


REWARD = """
def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    return sum(map(ord, solution_str)) % 997 / 996

char_count_reward_function = compute_score
"""
DATASET = """
from verl.utils.dataset import RLHFDataset

class CustomRLHFDataset(RLHFDataset):
    pass
"""
TWO_RANKS = {"trainer.n_gpus_per_node": "2"}
ULYSSES = "actor_rollout_ref.{}.ulysses_sequence_parallel_size"
SHARED = {ULYSSES.format("actor"): "2", ULYSSES.format("ref"): "2"}
ENDING = """
class Ending(Calling):
    '''Nor does it end a message, but seldom: here half of all bytes do.'''

    async def run(self, sampling_params, **columns):
        return await super().run(sampling_params | {"stop_token_ids": list(range(128))}, **columns)
"""
TEACHER = "distillation.teacher_models.teacher_model"
OWN_REWARD = {"custom_reward_function.path": "{files}/reward.py"}
LAUNCHES = (
    Launch(kind="grpo-fsdp", shows=lambda metrics: metrics["actor/kl_loss"] >= 0),
    Launch(kind="ppo-fsdp", shows=lambda metrics: metrics["critic/vf_loss"] > 0),
    Launch(kind="grpo-fsdp2", own=TWO_RANKS, shows=lambda metrics: metrics["actor/kl_loss"] >= 0),
    Launch(kind="ppo-megatron", own=TWO_RANKS, shows=lambda metrics: metrics["critic/vf_loss"] > 0),
    Launch(
        kind="dapo",
        own=TWO_RANKS | SHARED,
        shows=lambda metrics: metrics["critic/score/min"] < 0,  # the penalty of what is too long
    ),
    Launch(kind="gspo", shows=lambda metrics: "actor/pg_clipfrac" in metrics),
    Launch(
        kind="one-step-off",
        loop=one_step_off.LOOP,
        where={"config_path": one_step_off.CONFIG_DIR, "config_name": one_step_off.CONFIG_NAME},
        shows=lambda metrics: metrics["training/staleness/max"] == 1,
    ),
    Launch(
        kind="fully-async",
        loop=fully_async_main.LOOP,
        where={"config_path": fully_async_main.CONFIG_DIR, "config_name": fully_async_main.CONFIG_NAME},
        shows=lambda metrics: metrics["fully_async/count/current_param_version"] >= 1,
    ),
    Launch(kind="lora-megatron", own=TWO_RANKS, shows=lambda metrics: metrics["actor/kl_loss"] >= 0),
    Launch(
        kind="tools",
        own={
            ULYSSES.format("actor"): "1",
            "data.max_prompt_length": "300",
            "data.max_response_length": "120",
            "data.custom_cls.path": "{files}/dataset.py",
            "actor_rollout_ref.rollout.multi_turn.max_assistant_turns": "3",
            "actor_rollout_ref.rollout.multi_turn.tool_config_path": "{files}/tools.yaml",
            "actor_rollout_ref.rollout.agent.agent_loop_config_path": "{files}/loops.yaml",
            "actor_rollout_ref.rollout.agent.default_agent_loop": "calling",
        },
        shows=lambda metrics: metrics["num_turns/max"] > 2,
    ),
    Launch(
        kind="reward-model",
        own={"custom_reward_function.path": "null"},
        shows=lambda metrics: metrics["critic/score/min"] < metrics["critic/score/max"],  # rules would say 0
    ),
    Launch(
        kind="distillation",
        own={
            "actor_rollout_ref.rollout.max_model_len": "73",
            f"{TEACHER}.model_path": "{files}/teacher",
            f"{TEACHER}.inference.max_model_len": "73",
            f"{TEACHER}.inference.tensor_model_parallel_size": "1",
            f"{TEACHER}.inference.cpu_kvcache_gib": "0.1",
        },
        shows=lambda metrics: metrics["actor/distillation/abs_loss"] > 0 and "actor/pg_loss" not in metrics,
    ),
    Launch(kind="recipe", shows=lambda metrics: metrics["critic/score/max"] > 0),
)


@pytest.fixture(scope="module")
def files(tmp_path_factory, tiny_model):
    """What the user brings along."""
    directory = tmp_path_factory.mktemp("files")
    questions = [f"{left} + {right} =" for left in range(4) for right in range(4)]
    rows = {
        "data_source": ["builtin/arithmetic"] * len(questions),
        "prompt": [[{"role": "user", "content": question}] for question in questions],
        "reward_model": [{"style": "rule", "ground_truth": "2"}] * len(questions),
    }
    pq.write_table(pa.table(rows), directory / "data.parquet")
    (directory / "reward.py").write_text(REWARD)
    (directory / "dataset.py").write_text(DATASET)
    (directory / "loop.py").write_text(LOOP + ENDING)
    (directory / "tools.yaml").write_text(f"tools: [{{class_name: '{directory / 'loop.py'}:Add'}}]\n")
    (directory / "loops.yaml").write_text(f"- {{name: calling, _target_: '{directory / 'loop.py'}:Ending'}}\n")
    head.make(directory / "reward-model")
    make_tiny_model(directory / "teacher", seed=5)
    return directory


@pytest.mark.parametrize("launch", LAUNCHES, ids=lambda launch: launch.kind)
def test_a_launch_of_verl_runs(ray_cluster, files, tiny_model, tmp_path, launch):
    own = {
        "actor_rollout_ref.model.path": str(tiny_model),
        "critic.model.path": str(tiny_model),
        "reward.reward_model.model_path": str(files / "reward-model"),
        "data.train_files": str(files / "data.parquet"),
        "data.val_files": str(files / "data.parquet"),
        "trainer.default_local_dir": str(tmp_path / "out"),
    }
    own |= {key: value.replace("{files}", str(files)) for key, value in (OWN_REWARD | launch.own).items()}
    results = []
    run_hydra(
        lambda config: results.append(train(config, main_ppo._class_of(launch.loop))),
        argv_of(launch.kind, own),
        **launch.where,
    )
    run = Run(tmp_path, results[0])
    trained = {step: metrics for step, metrics in run.metrics.items() if step}
    assert list(trained) == [1, 2]
    for metrics in trained.values():
        assert metrics["actor/grad_norm"] > 0
        assert metrics["training/rollout_probs_diff_mean"] < 0.02
    assert {report["outcome"] for report in run.reports} == {"committed"}
    assert launch.shows(trained[2]), trained[2]
    adapters = run.out / "global_step_2/actor/lora_adapter/adapter_model.safetensors"
    assert adapters.exists() == (launch.kind == "lora-megatron")
    assert not (run.out / "reward_model.json").exists()  # the address of one that writes
