"""A run whose weights are lost says so, and ends, instead of going on without learning."""

from __future__ import annotations

import pytest

from tests.e2e.job import in_process
from verl.trainer.ppo.ray_trainer import RayPPOTrainer
from verl.trainer.ppo.skipped_steps import Diverged
from verl.utils.tracking import read_metrics

pytestmark = pytest.mark.e2e


class Spoiled(RayPPOTrainer):
    """From step 2 on advantages are NaN, and so are the gradients."""

    def __init__(self, **given):
        super().__init__(**given)
        filtered = self._experience.filtered

        def spoiled(batch, now):
            found = filtered(batch, now)
            if now.number >= 2:
                found.batch["advantages"] = found.batch["advantages"] * float("nan")
            return found

        self._experience.filtered = spoiled


def test_a_run_that_skips_every_update_ends_and_keeps_the_checkpoints_before(ray_cluster, tmp_path, caplog):
    overrides = (
        "trainer.total_training_steps=8",
        "trainer.save_freq=1",
        "trainer.max_actor_ckpt_to_keep=1",
        "trainer.max_skipped_steps=2",
    )
    with pytest.raises(Diverged, match=r"since step 2 each of 2 steps skipped an update"):
        in_process(tmp_path, *overrides, trainer_class=Spoiled)
    assert "step 2: 1 of the actor's optimizer steps were left out" in caplog.text
    assert sorted(path.name for path in (tmp_path / "out").glob("global_step_*")) == ["global_step_1", "global_step_2"]
    assert [record["step"] for record in read_metrics(tmp_path / "out/metrics.jsonl")] == [1, 2, 3]
