"""Real engines that got their weights from us generate Hugging Face's tokens, greedily, in every version."""

from __future__ import annotations

import json
import os
from typing import Any

import pytest

from tests.warm_workers import Fork, WarmWorkers

pytestmark = pytest.mark.vllm

ENGINES = {
    "llama": "float32",
    "qwen3-tied": "bfloat16",
    "gemma3_text": "float32",
    "gpt2": "float32",
    "gemma2": "bfloat16",
    "mixtral": "float32",
    "glm4_moe": "bfloat16",
    "gpt_oss": "bfloat16",
    "granitemoe": "float32",
    "falcon_h1": "float32",
}
"""Of every kind that vLLM runs on CPU; gpt_oss is loaded whole, every time."""


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory, warm: WarmWorkers) -> dict[str, Any]:
    directory = tmp_path_factory.mktemp("engines")
    printed, errors = directory / "printed", directory / "errors"
    environment = os.environ | {"OMP_NUM_THREADS": "1", "TORCHDYNAMO_DISABLE": "1", "VLLM_LOGGING_LEVEL": "ERROR"}
    arguments = [str(directory / "models"), *(f"{name}:{dtype}" for name, dtype in ENGINES.items())]
    with printed.open("w") as output, errors.open("w") as log:
        process = Fork(warm, "tests.models.engine_process", arguments, env=environment, stdout=output, stderr=log)
    code = process.end(printed, errors)
    lines = [json.loads(line) for line in printed.read_text().splitlines() if line.startswith("{")]
    assert code == 0, f"after {[line['name'] for line in lines]}: {errors.read_text()[-2000:]}"
    return {line["name"]: line for line in lines}


@pytest.mark.parametrize("name", ENGINES)
def test_an_engine_generates_hugging_faces_tokens_in_every_version(certificates: dict[str, Any], name: str):
    steps = certificates[name]["steps"]
    assert [step["before"] for step in steps] == ["dummy weights", "the model's weights", "other weights"]
    assert [(step["different"], step["wrong_tokens"]) for step in steps] == [({}, [])] * len(steps)
    assert all(step["tokens"] == 36 for step in steps)
    assert certificates[name]["passed"]
