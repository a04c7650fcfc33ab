"""Traces of rollout engines."""

import pytest

pytestmark = [pytest.mark.e2e, pytest.mark.vllm]


def test_an_engine_leaves_a_trace_of_each_chosen_step(start, warm):
    job = start(
        "trainer.total_training_steps=2",
        "data.train_batch_size=4",
        "actor_rollout_ref.actor.ppo_mini_batch_size=4",
        "data.val_max_samples=2",
        "actor_rollout_ref.rollout.name=vllm",
        "actor_rollout_ref.rollout.profiler.enable=true",
        "actor_rollout_ref.actor.profiler.enable=true",
        "actor_rollout_ref.actor.profiler.ranks=[0]",
        "global_profiler.tool=torch",
        "global_profiler.steps=[2]",
        warm=warm,
    )
    assert job.wait() == 0, job.stderr
    names = sorted(path.name for path in (job.output_dir / "profile").iterdir())
    assert "step_2_rank_0.json.gz" in names
    engines = [name for name in names if name != "step_2_rank_0.json.gz"]
    assert engines
    assert all("step_2" in name for name in engines)
