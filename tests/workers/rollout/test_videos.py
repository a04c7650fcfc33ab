"""Engines with videos: what they answer is what transformers alone does."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.pictures import HAS_TORCHVISION, with_torchvision
from tests.workers.rollout.seen_process import IN_BFLOAT16
from tests.workers.rollout.test_engines_see import NEAR
from verl.utils.language_model import WITH_VIDEOS_IN_VLLM

pytestmark = pytest.mark.skipif(not HAS_TORCHVISION, reason="no torchvision: make vision")


def told(engine: str, family: str, folder: Path) -> Any:
    environment = with_torchvision() | {"VERL_CACHE_DIR": str(folder / "cache"), "OMP_NUM_THREADS": "1"}
    environment |= {"TORCHDYNAMO_DISABLE": "1", "VLLM_LOGGING_LEVEL": "ERROR", "TMPDIR": str(folder)}
    program = [sys.executable, "-m", "tests.workers.rollout.video_process", str(folder / "answers"), family, engine]
    ended = subprocess.run(program, env=environment, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return json.loads((folder / "answers").read_text())


def compare(found: Any, family: str, *, exact: bool = True) -> None:
    """Of the long video, which comes last, transformers alone places what follows elsewhere in two families."""
    each = list(zip(found["answers"], found["expected"], found["scored"], strict=True))
    for number, ((tokens, log_probs), (expected, alone), by_trainer) in enumerate(each):
        near = 1e-4 if exact else NEAR
        assert log_probs == pytest.approx(by_trainer, abs=near)
        if number < len(each) - 1 or not family.startswith("qwen2"):
            assert not exact or tokens == expected
            assert log_probs == pytest.approx(alone, abs=near)
        else:
            assert log_probs != pytest.approx(alone, abs=near)


@pytest.mark.job
@pytest.mark.cells(3)
@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3_vl", "qwen3_5"])
def test_greedy_tokens_are_those_of_transformers_alone(tmp_path: Path, family: str) -> None:
    compare(told("hf", family, tmp_path), family)


@pytest.mark.vllm
@pytest.mark.cells(len(WITH_VIDEOS_IN_VLLM))
@pytest.mark.parametrize("family", WITH_VIDEOS_IN_VLLM)
def test_so_are_those_of_vllm_whose_inputs_are_its_own_processors(tmp_path: Path, family: str) -> None:
    found = told("vllm", family, tmp_path)
    compare(found, family, exact=family not in IN_BFLOAT16)
    assert found["inputs"] == []
