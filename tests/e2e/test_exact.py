"""That a trainer and its vLLM give every token the same probability, bit for bit, in whole runs."""

from __future__ import annotations

import json

import pytest
from transformers import AutoConfig

from tests.e2e.job import in_process
from tests.e2e.test_training import Run
from verl.utils.builtin import make_tiny_model
from verl.workers.hf.exact import layer_that_differs

pytestmark = [pytest.mark.e2e, pytest.mark.vllm]


def test_ratios_of_first_updates_are_one_and_probabilities_differ_by_nothing(ray_cluster, tmp_path):
    model = make_tiny_model(tmp_path / "model", "qwen3_moe")
    if found := layer_that_differs(AutoConfig.from_pretrained(model)):
        pytest.skip(f"on this processor {found} in bfloat16")
    result = in_process(
        tmp_path / "run",
        f"actor_rollout_ref.model.path={model}",
        "actor_rollout_ref.model.use_remove_padding=true",
        "actor_rollout_ref.rollout.name=vllm",
        "actor_rollout_ref.rollout.exact=true",
        "actor_rollout_ref.rollout.temperature=0.7",
        "actor_rollout_ref.rollout.max_num_seqs=5",
        "actor_rollout_ref.actor.entropy_coeff=0.1",  # no answer is right
        "actor_rollout_ref.actor.optim.lr=1e-3",
        "data.max_response_length=40",
        "data.train_batch_size=8",
        "actor_rollout_ref.actor.ppo_mini_batch_size=8",
        "trainer.n_gpus_per_node=2",
        "trainer.total_training_steps=3",
        "trainer.mismatch_probe_freq=1",
    )
    run = Run(tmp_path / "run", result)
    assert not [report for report in run.reports if "second model" in json.dumps(report["engine_checks"])]
    metrics = [step for number, step in run.metrics.items() if number]
    assert [step["training/rollout_probs_diff_max"] for step in metrics] == [0.0] * 3
    assert [step["actor/ppo_kl"] for step in metrics] == [0.0] * 3
    assert all(step["response_length/max"] > 1 for step in metrics)
    assert all(step["actor/grad_norm"] > 0 for step in metrics)
    worst = [json.loads((tmp_path / f"run/out/mismatch/{step}.jsonl").read_text()) for step in (2, 3)]
    assert [row["trainer_version"] for row in worst] == [1, 2]
    assert all(row["log_probs"] == row["trainer_log_probs"] for row in worst)
