"""vLLM rotates as transformers does, or the driver says by name that it does not."""

from __future__ import annotations

import json
import os
import re

import pytest
from transformers import CONFIG_MAPPING, PretrainedConfig

from tests.models.configurations import DENSE, EXPERTS, ORIGINAL, stretched
from tests.warm_workers import Fork
from verl.workers.hf.regimes import why_engine_differs

LENGTHS = (ORIGINAL - 1, ORIGINAL, 40)
LONG = stretched("longrope")["rope_parameters"]["long_factor"]
OF_LENGTHS = {"factor": None}
"""Of longrope: it scales by the ratio of the longest and the original length, which is not 6."""
YARN = {"original_max_position_embeddings": ORIGINAL}
CASES = {
    "longrope": ("phi3", "longrope", OF_LENGTHS),
    "longrope, equal factors": ("phi3", "longrope", OF_LENGTHS | {"short_factor": LONG}),
    "longrope, another factor": ("phi3", "longrope", {}),
    "longrope, another scale": ("phi3", "longrope", OF_LENGTHS | {"attention_factor": 1.7}),
    "longrope, scales": ("phimoe", "longrope", OF_LENGTHS | {"short_mscale": 1.1, "long_mscale": 1.4}),
    "longrope, scales alone": (
        "phimoe",
        "longrope",
        OF_LENGTHS | {"short_factor": LONG, "short_mscale": 1.1, "long_mscale": 1.4},
    ),
    "dynamic": ("llama", "dynamic", {}),
    "yarn": ("llama", "yarn", YARN),
    "yarn, scales": ("llama", "yarn", YARN | {"mscale": 0.7, "mscale_all_dim": 1.0}),
    "yarn, a scale": ("llama", "yarn", YARN | {"attention_factor": 1.7, "truncate": False}),
    "linear": ("llama", "linear", {}),
    "llama3": ("llama", "llama3", YARN | {"low_freq_factor": 1.0, "high_freq_factor": 4.0}),
}
"""Model type, kind, and what is other in its parameters."""


def config_of(case: str) -> PretrainedConfig:
    model_type, kind, parameters = CASES[case]
    fields = (DENSE | EXPERTS)[model_type] | {"sliding_window": None} | stretched(kind)
    fields["rope_parameters"] |= parameters
    if kind == "longrope":
        fields["original_max_position_embeddings"] = ORIGINAL
    if kind == "dynamic":
        fields["max_position_embeddings"] = ORIGINAL
    return CONFIG_MAPPING[model_type](**fields)


@pytest.fixture(scope="module")
def distances(warm, tmp_path_factory):
    """By case, longest sequence and length, see tests/models/rope_process.py."""
    folder = tmp_path_factory.mktemp("ropes")
    printed, errors = folder / "printed", folder / "errors"
    with printed.open("w") as output, errors.open("w") as log:
        process = Fork(warm, "tests.models.rope_process", [], env=dict(os.environ), stdout=output, stderr=log)
    assert process.end(printed, errors) == 0, errors.read_text()[-2000:]
    return json.loads(next(line for line in printed.read_text().splitlines() if line.startswith("{")))


@pytest.mark.vllm
@pytest.mark.parametrize("longest", LENGTHS)
@pytest.mark.parametrize("case", CASES)
def test_vllm_rotates_every_sequence_as_transformers_does_or_is_said_not_to(distances, case, longest):
    found = [distances[f"{case} {longest} {length}"] for length in LENGTHS if length <= longest]
    assert (why_engine_differs(config_of(case), "vllm", longest) is None) == (max(found) < 1e-5), found


@pytest.mark.parametrize(
    ("case", "engine", "words"),
    [
        ("longrope", "vllm", "more than original_max_position_embeddings=12 tokens, vllm for all: .* longer than 12"),
        ("longrope", "sglang", "sglang for those that are computed beside a longer one, too"),
        ("longrope, another factor", "vllm", "vllm for all"),
        ("dynamic", "vllm", "max_position_embeddings=12 tokens, vllm of none: make sequences no longer than 12"),
        ("dynamic", "sglang", "sglang of all"),
    ],
)
def test_who_would_be_rotated_otherwise_is_told_how_and_what_to_do(case, engine, words):
    assert re.search(words, why_engine_differs(config_of(case), engine, 40))


def test_the_scale_that_is_told_is_the_engines():
    told = why_engine_differs(config_of("longrope, another scale"), "vllm", ORIGINAL)
    config = config_of("longrope, another scale")
    config.rope_parameters["attention_factor"] = float(re.search(r"attention_factor=([\d.]+)", told)[1])
    assert why_engine_differs(config, "vllm", ORIGINAL) is None
