"""TRL's own trainer, over steps of its own: a real vLLM server computes with what it has trained."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.checkpoint_engine.publisher.trl_process import STEPS, Pushed
from tests.checkpoint_engine.served_vllm import served_vllm
from tests.warm_workers import WarmWorkers
from verl.utils.builtin import make_tiny_model

ROOT = Path(__file__).parents[3]
TRL = Path(sys.prefix) / "trl"
"""As `make install` puts it there."""
STAND_INS = Path(__file__).parent / "trl_stand_ins"

pytestmark = [
    pytest.mark.vllm,
]


@pytest.fixture(scope="module")
def pushed(tmp_path_factory: pytest.TempPathFactory, warm: WarmWorkers) -> list[Pushed]:
    base = tmp_path_factory.mktemp("trl")
    model = make_tiny_model(base / "tiny", "qwen3")
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(map(str, (ROOT, TRL, STAND_INS))),
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "TORCHDYNAMO_DISABLE": "1",
        "TRL_EXPERIMENTAL_SILENCE": "1",
        "VERL_SHM_DIR": str(base),
    }
    with served_vllm(model, base, warm) as server:
        program = "tests.checkpoint_engine.publisher.trl_process"
        command = [sys.executable, "-m", program, str(model), server.url, str(base / "served"), str(base / "out")]
        try:
            done = subprocess.run(command, cwd=base, env=environment, capture_output=True, timeout=900, text=True)
        except subprocess.TimeoutExpired as exc:  # which cuts what it tells
            said = b"\n".join(part or b"" for part in (exc.stdout, exc.stderr))
            raise AssertionError(f"not done within {exc.timeout} s:\n{said.decode()}") from None
    assert done.returncode == 0, done.stdout + done.stderr
    assert list(base.glob("verl-*")) == []
    return [Pushed(**one) for one in json.loads(done.stdout.splitlines()[-1])]


def test_every_step_is_served_bit_for_bit(pushed: list[Pushed]):
    assert [one.version for one in pushed] == list(range(STEPS + 1))
    assert {one.version: one.different for one in pushed if one.different} == {}


def test_the_server_says_what_the_trainer_would_and_not_what_it_said_before_the_step(pushed: list[Pushed]):
    for one in pushed:
        assert one.distance < 1e-4
    for one in pushed[1:]:
        assert one.moved > 0
        assert one.distance_before > 100 * one.distance
