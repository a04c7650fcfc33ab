"""vLLM rotates as transformers does, or the driver says by name that it does not."""

from __future__ import annotations

import json
import os
import re

import pytest
import torch
from transformers import CONFIG_MAPPING, PretrainedConfig

from tests.models import cases
from tests.models.architectures import Architecture, write_checkpoint
from tests.models.configurations import DENSE, EXPERTS, ORIGINAL, stretched
from tests.warm_workers import Fork
from tests.workers.engine.engine_cases import make_engine
from verl.protocol import DataProto
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


ENGINES = {"inside": ("longrope", ORIGINAL), "beyond": ("longrope, equal factors", 40)}
"""Case, and the most tokens of a sequence: of such longrope vLLM is said to be right."""


@pytest.fixture(scope="module")
def sampled(warm, tmp_path_factory):
    """By engine: directory, and [prompt, tokens, log-probs] of each response."""
    folder = tmp_path_factory.mktemp("engines")
    for name, (case, _) in ENGINES.items():
        config = config_of(case)
        fields = {field: value for field, value in config.to_dict().items() if field != "model_type"}
        model = Architecture(name=case, model_type=config.model_type, kind="dense", config=fields)
        write_checkpoint(model, folder / name)
    printed, errors = folder / "printed", folder / "errors"
    arguments = [str(folder / "answers"), *(f"{longest}:{folder / name}" for name, (_, longest) in ENGINES.items())]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "TORCHDYNAMO_DISABLE": "1", "VLLM_LOGGING_LEVEL": "ERROR"}
    with printed.open("w") as output, errors.open("w") as log:
        process = Fork(warm, "tests.models.stretched_process", arguments, env=environment, stdout=output, stderr=log)
    assert process.end(printed, errors) == 0, errors.read_text()[-2000:]
    answers = json.loads((folder / "answers").read_text())
    return {name: (folder / name, found) for name, found in zip(ENGINES, answers, strict=True)}


@pytest.mark.vllm
@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("name", ENGINES)
def test_log_probs_of_a_trainer_are_those_of_a_whole_engine_with_longrope(sampled, name):
    directory, answers = sampled[name]
    engine = make_engine(directory)
    assert max(len(prompt) + len(tokens) for prompt, tokens, _ in answers) == ENGINES[name][1]
    for prompt, tokens, log_probs in answers:
        ids = torch.tensor([prompt + tokens])
        data = DataProto.from_dict(
            tensors={
                "prompts": ids[:, : len(prompt)],
                "responses": ids[:, len(prompt) :],
                "response_mask": torch.ones(1, len(tokens), dtype=torch.long),
                "input_ids": ids,
                "attention_mask": torch.ones_like(ids),
                "position_ids": torch.arange(ids.shape[1])[None],
            }
        )
        assert cases.log_probs(engine, data)[0].tolist() == pytest.approx(log_probs, abs=1e-4)
