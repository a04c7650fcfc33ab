"""Two runs with `trainer.full_determinism=true` are one run: metrics, samples and checkpoints have the same bits."""

from __future__ import annotations

from pathlib import Path

import pytest
from transformers import AutoConfig

from tests.e2e import seeded
from tests.e2e.job import in_process
from verl.utils.builtin import make_tiny_model
from verl.workers.hf.exact import layer_that_differs

pytestmark = pytest.mark.e2e

STEPS = 2


@pytest.mark.vllm
def test_which_requests_an_engine_computes_together_and_when_they_come_changes_nothing(ray_cluster, tmp_path: Path):
    """The second run has other agent-loop workers, and room for another number of requests."""
    model = make_tiny_model(tmp_path / "model", "qwen2", tie_word_embeddings=True)
    if found := layer_that_differs(AutoConfig.from_pretrained(model)):
        pytest.skip(f"on this processor {found} in bfloat16")
    runs = [tmp_path / "a", tmp_path / "b"]
    for run, workers, together in zip(runs, (1, 2), (16, 5), strict=True):
        in_process(
            run,
            *seeded.kept(run / "out", STEPS),
            f"actor_rollout_ref.model.path={model}",
            "actor_rollout_ref.rollout.name=vllm",
            "actor_rollout_ref.rollout.exact=true",
            f"actor_rollout_ref.rollout.max_num_seqs={together}",
            f"actor_rollout_ref.rollout.agent.num_workers={workers}",
            "actor_rollout_ref.actor.optim.lr=1e-3",
            "data.max_response_length=24",
            "data.train_batch_size=8",
            "actor_rollout_ref.actor.ppo_mini_batch_size=4",
        )
    assert len(seeded.require_equal(*(run / "out" for run in runs))["checkpoints"]) == 1
    assert len({row["response"] for row in seeded.samples_of(runs[0] / "out", 1)}) > 1, "they are sampled"
    for step in range(1, STEPS + 1):
        ours, theirs = ((run / f"out/samples/{step}.jsonl").read_bytes() for run in runs)
        assert ours == theirs
