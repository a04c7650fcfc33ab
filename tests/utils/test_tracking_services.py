"""What services of `trainer.logger` have of a run, by their own packages and readers, offline."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = ROOT / ".venv/trackers"
PROGRAM = Path(__file__).with_name("track_program.py")
pytestmark = pytest.mark.skipif(not PACKAGES.is_dir(), reason="make trackers")
NAME = "val-core//data/math (v2)/acc/mean@4"
CALLED = {"mlflow": "val-core/data/math _v2_/acc/mean_at_4"}


@pytest.mark.parametrize("service", ["wandb", "swanlab", "mlflow", "trackio", "clearml"])
def test_a_run_that_is_resumed_is_one_run_with_its_steps_and_samples(service, tmp_path):
    environment = os.environ | {
        "HOME": str(tmp_path / "home"),
        "PYTHONPATH": f"{ROOT}{os.pathsep}{PACKAGES}",
        "WANDB_MODE": "offline",
        "SWANLAB_MODE": "offline",
        "CLEARML_OFFLINE_MODE": "1",
        "TRACKIO_DIR": str(tmp_path / "trackio"),
    }

    def run(what):
        command = [sys.executable, str(PROGRAM), service, str(tmp_path), what]
        done = subprocess.run(command, env=environment, text=True, capture_output=True, timeout=300, check=False)
        assert done.returncode == 0, done.stderr
        return done.stdout.splitlines()[-1] if what == "read" else ""

    for what in ("first", "resumed"):
        run(what)
    found = json.loads(run("read"))
    points = {(name, step): float(value) for name, step, value in found["points"]}
    assert len(found["runs"]) == 1
    assert {step: points["critic/score/mean", step] for step in range(1, 5)} == {1: 0.25, 2: 0.5, 3: 0.75, 4: 1.0}
    assert {step for name, step in points if name == "critic/score/mean"} == {1, 2, 3, 4}
    assert [points[CALLED.get(service, NAME), step] for step in range(1, 5)] == [1.0] * 4
    assert all(math.isnan(value) for (name, _), value in points.items() if name == "actor/grad_norm")
    shown = "\n".join(found["samples"])
    assert "one?" in shown
    assert [step for step in range(1, 5) if f"answer {step}" not in shown] == []
    run("first")
    assert len(json.loads(run("read"))["runs"]) == 2
