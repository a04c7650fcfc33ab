"""Engines with pictures: the whole model is sent, and what they answer is what transformers alone does."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import pytest

from tests.pictures import HAS_TORCHVISION, with_torchvision
from tests.seeing import make_seeing
from tests.sglang_on_cpu import NEEDS_SGLANG, PROGRAM
from tests.workers.rollout.seen_process import VERSIONS, dtype_of
from verl.utils.language_model import SEEING_IN_SGLANG, SEEING_IN_VLLM

SPLIT = "qwen3_vl"
"""Over two ranks, with heads of the tower and of the language model on each."""
NEAR = 0.005
"""What log-probs of vLLM in bfloat16 may be from those of transformers in float32, of the same weights."""

VLLM = [pytest.mark.vllm, pytest.mark.skipif(not HAS_TORCHVISION, reason="no torchvision: make vision")]
SGLANG = [pytest.mark.sglang, NEEDS_SGLANG]
ENGINES = [
    *(pytest.param(("vllm", name, 1), marks=VLLM) for name in SEEING_IN_VLLM),
    pytest.param(("vllm", SPLIT, 2), marks=VLLM),
    *(pytest.param(("sglang", name, 1), marks=SGLANG) for name in SEEING_IN_SGLANG),
]

pytestmark = pytest.mark.cells((len(ENGINES) + 1) // 2, by="told")


@pytest.fixture(scope="module", params=ENGINES, ids=str)
def told(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """What an engine found and answered, and the models that it was sent."""
    engine, name, ranks = request.param
    base = tmp_path_factory.mktemp("sees")
    models = {version: make_seeing(base / str(version), name, seed=version) for version in VERSIONS}
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VERL_CACHE_DIR", str(base / "cache"))
        environment = with_torchvision() if engine == "vllm" else {**os.environ, **PROGRAM}
        environment |= {"OMP_NUM_THREADS": "1", "TORCHDYNAMO_DISABLE": "1", "TMPDIR": str(base)}
        environment |= {"VLLM_LOGGING_LEVEL": "ERROR"}
        program = [sys.executable, "-m", "tests.workers.rollout.seen_process", engine, str(base / "answers")]
        ended = subprocess.run(
            [*program, str(ranks), *map(str, models.values())],
            env=environment,
            capture_output=True,
            text=True,
            check=False,
        )
        assert ended.returncode == 0, ended.stdout + ended.stderr
        yield engine, json.loads((base / "answers").read_text()), models


@pytest.mark.parametrize("version", VERSIONS)
def test_every_version_computes_with_what_it_would_have_read_from_disk(told: Any, version: int) -> None:
    """Tower and all."""
    ends = {1: "live tensors equal a load from disk", 2: "live tensors were written anew"}
    engine, found, _ = told
    end = ends[version] if engine == "vllm" else "came from the version, and every tensor of it was taken"
    assert found["checks"][version - 1].endswith(end)


@pytest.mark.parametrize("version", VERSIONS)
def test_greedy_tokens_and_log_probs_are_those_of_transformers_alone(told: Any, version: int) -> None:
    """The second version sees the pictures that the first has seen: with its own tower."""
    _, found, models = told
    exact = dtype_of(models[version]) == "float32"
    both = zip(found["answers"][version - 1], found["expected"][version - 1], strict=True)
    for (tokens, log_probs), (expected, of_tokens) in both:
        assert not exact or tokens == expected
        assert log_probs == pytest.approx(of_tokens, abs=1e-4 if exact else NEAR)


def test_a_frozen_answer_goes_on_with_what_the_new_tower_sees(told: Any) -> None:
    """Its picture had been seen by the tower of the version before."""
    _, found, models = told
    assert found["kept"] < (1e-4 if dtype_of(models[1]) == "float32" else NEAR)


def test_inputs_are_those_of_vllms_own_processor(told: Any) -> None:
    """Ids, the places of pictures among them, and what the model is given of each."""
    assert told[1]["inputs"] == []


def test_requests_whose_pictures_are_wrong_fail_alone(told: Any) -> None:
    few, gone = told[1]["refused"]
    assert "request r: pictures become " in few
    assert few.endswith("tokens, and there are 0")
    assert "where there is no file" in gone
