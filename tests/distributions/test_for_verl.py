"""What is for PyPI's verl 0.9.1, run with it: its package is `verl` there, so in processes of their own."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pandas
import pytest

from tests.distributions.environments import BESIDE, ROOT, copy_with_verl, name_vllm, run
from tests.distributions.with_verl.main_ppo import ENVIRONMENT, REPLICAS, STEPS, overrides
from verl.utils.builtin.tiny import make_tiny_model

CHECKS = (
    "check_published.py",
    "check_held.py",
    "check_registration.py",
    "check_rollout.py",
    "check_pausing.py",
    "check_manager.py",
)
FORGOTTEN = 3
"""The version that no server is told of, and the step whose rollouts should have come from it: the first is from 1."""


@pytest.mark.cells(7)  # minutes each
def test_with_pypi_s_verl(site: Path, tmp_path: Path):
    here = copy_with_verl(tmp_path)
    name_vllm(tmp_path)
    options = ["-q", "-c", ROOT / "pyproject.toml", "--rootdir", tmp_path, "-p", "no:cacheprovider"]
    command = [sys.executable, "-m", "pytest", *options, *(here / name for name in CHECKS)]
    done = run(command, path=[tmp_path, site, BESIDE], cwd=tmp_path, timeout_s=1100)
    assert " passed in " in done.stdout.splitlines()[-1], done.stdout


@pytest.mark.vllm
@pytest.mark.cells(7)  # minutes each
@pytest.mark.timeout(1500)
@pytest.mark.parametrize("use_v1", [True, False])
def test_its_own_main_ppo_trains_with_our_syncs_and_a_stale_version_would_be_noticed(
    site: Path, tmp_path: Path, use_v1: bool
):
    copy_with_verl(tmp_path)
    name_vllm(tmp_path)
    make_tiny_model(tmp_path / "model")
    questions = [{"role": "user", "content": f"What is {number} + {number}?"} for number in range(16)]
    pandas.DataFrame(
        {
            "prompt": [[question] for question in questions],
            "data_source": "sums",
            "reward_model": [{"style": "rule", "ground_truth": str(2 * number)} for number in range(16)],
        }
    ).to_parquet(tmp_path / "train.parquet")
    command = [sys.executable, "-m", "verl.trainer.main_ppo", *overrides(tmp_path, use_v1=use_v1)]
    environment = {**ENVIRONMENT, "VERL_FILE_LOGGER_PATH": str(tmp_path / "metrics.jsonl")}
    run(command, path=[tmp_path, site, BESIDE], cwd=tmp_path, timeout_s=1400, env=environment)

    reports = lines_of(tmp_path / "reports.jsonl")
    assert [(report["version"], report["outcome"]) for report in reports] == [
        (version, "committed") for version in range(1, STEPS + 2)
    ]
    for report in reports:
        assert report["replicas_updated"] == [f"replica-{number}" for number in range(REPLICAS)]
        published = {member["member"]: member["nbytes"] for member in report["members"]["publish"]["slowest"]}
        assert published["trainer-0"] == published["trainer-1"] == report["nbytes_needed"] / 2, "shards, not a gather"

    steps = {line["step"]: line["data"] for line in lines_of(tmp_path / "metrics.jsonl")}
    difference = {step: steps[step]["training/rollout_probs_diff_mean"] for step in range(1, STEPS + 1)}
    stale = difference.pop(FORGOTTEN)
    assert max(difference.values()) < 1e-6
    assert stale > 1e-4


def lines_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]
