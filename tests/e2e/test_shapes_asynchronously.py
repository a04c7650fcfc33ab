"""Runs over drawings whose generation goes on meanwhile: what a model sees reaches every process, and outlives it."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.e2e import seeded
from tests.e2e.test_fully_async_recovery import WHERE
from tests.e2e.test_one_step_off import one_step_off
from tests.e2e.test_shapes import STEPS, files  # noqa: F401 - fixture
from tests.e2e.test_training import Run
from verl.experimental.fully_async_policy.trainer import FullyAsyncTrainer
from verl.trainer.checkpoints import CheckpointDirectory

pytestmark = pytest.mark.e2e

STALE = (
    "async_training.staleness_threshold=1",
    "async_training.trigger_parameter_sync_step=1",
    "async_training.require_batches=1",
    "algorithm.rollout_correction.rollout_is=null",
    "trainer.n_gpus_per_node=1",
    "trainer.full_determinism=false",  # what arrives first decides
)


def overrides(files: Path, directory: Path) -> list[str]:  # noqa: F811 - the fixture
    return [
        *seeded.overrides(files, directory / "out", STEPS),
        f"actor_rollout_ref.model.path={files / 'sees'}",
        "data.train_files=builtin:shapes",
        "data.val_files=builtin:shapes",
        "checkpoint_engine.backend=gloo",
        "trainer.save_freq=1",
    ]


def fully_async(directory: Path, *given: str, trainer_class: Any = FullyAsyncTrainer) -> Run:
    samples = f"trainer.rollout_data_dir={directory / 'samples'}"
    return Run.of(directory, *given, samples, trainer_class=trainer_class, **WHERE)


def test_one_step_ahead_all_but_the_first_batch_is_one_version_old(
    ray_cluster: None,
    files: Path,  # noqa: F811
    tmp_path: Path,
) -> None:
    found = one_step_off(tmp_path, *overrides(files, tmp_path))
    assert [each["training/staleness/max"] for each in found.metrics.values()] == [0, 1, 1]
    assert all(each["actor/grad_norm"] > 0 for each in found.metrics.values())
    assert found.metrics[1]["training/rollout_probs_diff_mean"] < 0.003


def test_samples_of_a_checkpoint_keep_their_pictures(
    ray_cluster: None,
    files: Path,  # noqa: F811
    tmp_path: Path,
) -> None:
    run = fully_async(tmp_path, *overrides(files, tmp_path), *STALE)
    state = CheckpointDirectory.read(run.out / "global_step_1").dataloader["rollouter"]
    assert "('picture', " in str((state["queued"], state["in_flight"]))
    shutil.rmtree(run.out / f"global_step_{STEPS}")
    shutil.rmtree(run.out / "global_step_2")
    (run.out / "latest_checkpointed_iteration.txt").write_text("1")
    fully_async(tmp_path, *overrides(files, tmp_path), *STALE)
    rows = [sample for step in range(1, STEPS + 1) for sample in run.samples(step)]
    assert len({row["index"] for row in rows}) == len(rows) == STEPS * 4
