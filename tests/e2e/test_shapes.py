"""Whole runs over drawings of shapes: a model that sees learns, is kept, goes on and is exported, tower and all."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForImageTextToText

from tests.e2e import seeded
from tests.e2e.job import in_process
from verl.utils.builtin.seeing import make_tiny_seeing_model

pytestmark = pytest.mark.e2e

STEPS = 3


def run(files: Path, directory: Path) -> Path:
    """Its output. Samples follow from prompts and weights, and a reference model is part of the rewards."""
    directory.mkdir(exist_ok=True)
    in_process(
        directory,
        *seeded.overrides(files, directory / "out", STEPS),
        "trainer.save_freq=1",
        f"actor_rollout_ref.model.path={files / 'sees'}",
        "data.train_files=builtin:shapes",
        "data.val_files=builtin:shapes",
    )
    return directory / "out"


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = seeded.make_files(tmp_path_factory.mktemp("files"))
    make_tiny_seeing_model(directory / "sees", dtype="bfloat16")
    return directory


@pytest.fixture(scope="module")
def whole(ray_cluster: None, files: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return run(files, tmp_path_factory.mktemp("shapes") / "whole")


def test_the_engine_says_what_the_trainer_says_of_pictures_in_every_step(whole: Path) -> None:
    metrics = seeded.metrics_of(whole)
    assert list(metrics) == list(range(1, STEPS + 1))
    assert max(each["training/rollout_probs_diff_mean"] for each in metrics.values()) < 0.003
    assert all(each["actor/grad_norm"] > 0 for each in metrics.values())
    assert metrics[1]["actor/reward_kl_penalty"] == pytest.approx(0, abs=1e-6)  # not a step from the reference yet
    assert metrics[STEPS]["actor/reward_kl_penalty"] != pytest.approx(0, abs=1e-6)
    reports = [json.loads(line) for line in (whole / "sync_reports.jsonl").read_text().splitlines()]
    assert [(each["version"], each["outcome"]) for each in reports] == [(n, "committed") for n in range(STEPS + 1)]


def test_the_export_is_a_checkpoint_of_transformers_whose_tower_has_learned(whole: Path, files: Path) -> None:
    exported = whole / f"global_step_{STEPS}/actor/huggingface"
    before, after = (load_file(directory / "model.safetensors") for directory in (files / "sees", exported))
    assert before.keys() == after.keys()
    assert not any(torch.equal(before[name], after[name]) for name in before if name.endswith("mlp.gate_proj.weight"))
    model, info = AutoModelForImageTextToText.from_pretrained(exported, output_loading_info=True)
    assert not any(info[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert type(model.config) is type(AutoConfig.from_pretrained(files / "sees"))
    assert (exported / "preprocessor_config.json").read_text() == (files / "sees/preprocessor_config.json").read_text()


def test_a_run_goes_on_from_its_checkpoint_to_the_same_weights(whole: Path, files: Path, tmp_path: Path) -> None:
    directory = tmp_path / "resumed"
    shutil.copytree(whole, directory / "out")
    shutil.rmtree(directory / f"out/global_step_{STEPS}")
    (directory / "out/latest_checkpointed_iteration.txt").write_text(str(STEPS - 1))
    resumed = run(files, directory)
    assert STEPS in seeded.require_equal(whole, resumed)["checkpoints"]
