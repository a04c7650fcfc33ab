"""A run that is killed while a checkpoint is written in the background."""

import pytest

from tests.e2e import slow_writes
from verl.utils.tracking import read_metrics

pytestmark = pytest.mark.e2e

OVERRIDES = (
    "trainer.n_gpus_per_node=2",
    "actor_rollout_ref.actor.checkpoint.async_save=true",
    "trainer.save_freq=1",
    "trainer.total_training_steps=3",
)


def test_a_run_that_is_killed_while_it_writes_a_checkpoint_goes_on_from_the_one_before(start, warm):
    job = start(*OVERRIDES, f"actor_rollout_ref.model.external_lib={slow_writes.__name__}", warm=warm)
    job.wait_for_checkpoint(1)
    metrics, half = job.output_dir / "metrics.jsonl", job.output_dir / ".global_step_2.partial"
    job.wait_for((half / "actor/begun").exists, "a second save")
    job.wait_for(lambda: len(read_metrics(metrics)) == 2, "the end of the second step, which does not wait for it")
    job.driver.kill()
    job.wait()
    assert job.left() == []
    assert half.exists()
    assert not (job.output_dir / "global_step_2").exists()
    again = start(*OVERRIDES, warm=warm)
    assert again.wait() == 0, again.stderr
    assert f"resuming from {job.output_dir / 'global_step_1'}" in again.stderr
    assert not half.exists()
    assert [path.name for path in sorted(job.output_dir.glob("*global_step_*"))] == [
        f"global_step_{step}" for step in (1, 2, 3)
    ]
    assert [record["step"] for record in read_metrics(metrics)] == [1, 2, 3]
