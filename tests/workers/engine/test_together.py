"""A sequence has the log-probs and gradients that it has alone in Hugging Face's eager model, whoever shares its batch.

The models here see some of their tokens (chosen by a score, in chunks of the row, ...), or place them by the longest
sequence of a call. The sequences are longer than all that.
"""

from __future__ import annotations

import copy
import math

import pytest
import torch
import torch.distributed as dist
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from tests.models import cases
from tests.models.architectures import Architecture, write_checkpoint
from tests.models.configurations import KINDS
from tests.workers.engine.engine_cases import make_engine
from verl.workers.engine.micro_batches import MicroBatchLimits
from verl.workers.hf.attention import attention_implementation
from verl.workers.hf.probing import Probe, Way, find_way

ORIGINAL = 12
"""Tokens that positions are made for: two of the four sequences of `padded_batch` have more, in all but one case."""
SPARSE = {"index_topk": 4, "index_n_heads": 16, "index_head_dim": 32}
TIES = {"index_n_heads": 1}
"""Scores of keys are 0 where no head likes them. Which of those are chosen depends on how long a row is."""
LATENT = {
    **{key: value for key, value in KINDS["experts"]["deepseek_v3"].items() if key != "topk_method"},
    **SPARSE,
}


def base(model_type: str) -> dict:
    return next(dict(rows[model_type]) for rows in KINDS.values() if model_type in rows)


def stretched(kind: str, columns: int, **more) -> dict:
    """Parameters of rotary embeddings; frequencies of `columns` / 2 pairs."""
    factors = {}
    if kind == "longrope":
        factors = {
            "short_factor": [1.0] * (columns // 2),
            "long_factor": [2.0 + pair for pair in range(columns // 2)],
            "original_max_position_embeddings": ORIGINAL,
        }
    return {"rope_type": kind, "rope_theta": 10000.0, "factor": 4.0, **factors, **more}


MODELS = {
    "deepseek_v32": ("deepseek_v32", LATENT),
    "deepseek_v32 with ties": ("deepseek_v32", LATENT | TIES),
    "glm_moe_dsa": ("glm_moe_dsa", LATENT | {"mlp_layer_types": ["dense", "sparse"]}),
    "axk2": ("axk2", LATENT | {"mlp_layer_types": ["dense", "sparse"]}),
    "hy_v4": ("hy_v4", LATENT | {"mlp_layer_types": ["dense", "sparse"]}),
    "doge": ("doge", base("doge") | {"keep_window_size": 4}),
    "llama4 without tuning": (
        "llama4_text",
        base("llama4_text") | {"attention_chunk_size": 8, "attn_temperature_tuning": False},
    ),
    "longrope": (
        "phi3",
        base("phi3") | {"rope_parameters": stretched("longrope", 32), "original_max_position_embeddings": ORIGINAL},
    ),
    "longrope with scales": (
        "phimoe",
        base("phimoe") | {"rope_parameters": stretched("longrope", 32, short_mscale=1.1, long_mscale=1.4)},
    ),
    "dynamic": (
        "llama",
        base("llama") | {"rope_parameters": stretched("dynamic", 32), "max_position_embeddings": ORIGINAL},
    ),
}
WAYS = {
    "deepseek_v32": Way.ROWS,
    "deepseek_v32 with ties": Way.ALONE,
    "glm_moe_dsa": Way.ROWS,
    "axk2": Way.ROWS,
    "hy_v4": Way.PACKED,
    "doge": Way.ROWS,
    "llama4 without tuning": Way.ROWS,
    "longrope": Way.PACKED,
    "longrope with scales": Way.PACKED,
    "dynamic": Way.PACKED,
}
"""How far sequences may go together: what is safe, and no slower."""
ALL_IN_ONE = MicroBatchLimits(max_sequences=4)
TWO = MicroBatchLimits(max_sequences=2)


@pytest.fixture(scope="module", autouse=True)
def one_rank():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def architecture(name: str) -> Architecture:
    model_type, config = MODELS[name]
    known = CONFIG_MAPPING[model_type]()
    config = {key: value for key, value in config.items() if hasattr(known, key)}
    return Architecture(name=name, model_type=model_type, kind="", config=config)


@pytest.fixture(scope="module", params=MODELS)
def directory(request, tmp_path_factory):
    found = tmp_path_factory.mktemp("model")
    write_checkpoint(architecture(request.param), found)
    return found


@pytest.fixture(scope="module", params=["rows", "packed"])
def engine(directory, request):
    return make_engine(directory, model={"use_remove_padding": request.param == "packed"})


def untouched(directory):
    """A new one: a model may remember how long the sequences of its earlier calls were."""
    return cases.reference(directory)[0]


def reference_log_probs(directory, data):
    return torch.cat([cases.reference_log_probs(untouched(directory), data[[row]]) for row in range(len(data))])


def build(config, implementation):
    asked = {"attn_implementation": implementation} if implementation else {}
    return AutoModelForCausalLM.from_config(copy.deepcopy(config), dtype=torch.float32, **asked)


def summed(log_prob, entropy, micro_batch, totals):
    return -(log_prob * micro_batch.batch["response_mask"]).sum(), {}


@pytest.mark.parametrize("limits", [ALL_IN_ONE, TWO], ids=["one micro-batch", "two"])
def test_log_probs_are_those_of_each_sequence_alone(directory, engine, limits):
    data = cases.padded_batch()
    for order in ([0, 1, 2, 3], [3, 1, 0, 2], [2, 1]):
        found = engine.compute_log_prob(data[order], temperature=1.0, limits=limits)[0]
        torch.testing.assert_close(found, reference_log_probs(directory, data[order]), rtol=0, atol=1e-4)


def test_gradients_are_those_of_the_sequences_alone(directory, engine):
    data = cases.padded_batch()
    gradients: dict[str, torch.Tensor] = {}
    for row in range(len(data)):
        model = untouched(directory)
        ids = data.batch["input_ids"][row][data.batch["attention_mask"][row].bool()]
        length = int(data.batch["response_mask"][row].sum())
        logits = model(input_ids=ids[None], use_cache=False).logits[0, -length - 1 : -1]
        (-logits.log_softmax(-1).gather(-1, ids[-length:, None]).sum()).backward()
        for name, parameter in model.named_parameters():
            if parameter.grad is not None:
                gradients[name] = gradients.get(name, 0) + parameter.grad
    squares = sum(float(gradient.square().sum()) for gradient in gradients.values())
    before = engine.snapshot()
    saved = {name: tensor.clone() for name, tensor in before.items()}
    metrics = engine.train_mini_batch(data, summed, temperature=1.0, limits=ALL_IN_ONE)
    engine.restore(saved)
    assert metrics["grad_norm"] == pytest.approx(math.sqrt(squares), rel=1e-4)


async def test_decoded_tokens_have_the_log_probs_of_what_is_before_them_alone(directory):
    model = untouched(directory)
    for together in await cases.decoded(directory, cases.ORDERS):
        for prompt, output in together:
            expected = cases.foretold_as_it_grows(lambda: copy.deepcopy(model), prompt, output.token_ids)
            torch.testing.assert_close(torch.tensor(output.log_probs), expected, rtol=0, atol=1e-4)


@pytest.mark.parametrize("name", MODELS)
def test_sequences_go_together_as_far_as_a_small_model_keeps_them_as_they_are(name):
    config = architecture(name).make_config()
    found = find_way(config, build, attention_implementation(config), furthest=Way.PACKED)
    assert found.way is WAYS[name], found.why


@pytest.mark.parametrize("model_type", ["falcon_h1", "zamba", "zamba2", "codegen", "bamba", "deepseek_v3"])
@torch.no_grad()
def test_models_that_probes_ask_are_small(model_type):
    small = Probe.of(CONFIG_MAPPING[model_type](), build, None).model
    assert small.config.num_hidden_layers <= 4
    assert sum(parameter.numel() for parameter in small.parameters()) < 30e6


@torch.no_grad()
@pytest.mark.parametrize("model_type", ["jamba", "bamba", "zamba", "zamba2", "nemotron_h", "qwen3_next"])
def test_models_that_probes_ask_have_layers_of_each_kind(model_type):
    """Attention is some layers' alone, which configurations say in many ways: lists of kinds, of numbers, periods."""
    more = {"attn_layer_indices": [9, 18]} if model_type == "bamba" else {}
    small = Probe.of(CONFIG_MAPPING[model_type](**more), build, None).model
    names = {type(module).__name__.lower() for module in small.modules()}
    assert any(name.endswith("attention") for name in names)
    assert any("mixer" in name or "gateddeltanet" in name for name in names)


def test_a_model_that_no_probe_can_build_has_one_sequence_at_a_time_and_says_why():
    def fails(config, implementation):
        raise ValueError("no such layer")

    found = find_way(architecture("dynamic").make_config(), fails, "sdpa", furthest=Way.ROWS)
    assert found.way is Way.ALONE
    assert "no such layer" in found.why


def test_a_probe_takes_no_random_numbers_of_anybody_else():
    torch.manual_seed(3)
    before = torch.random.get_rng_state()
    config = architecture("longrope").make_config()
    config.rms_norm_eps = 2e-6  # asked by nobody before
    find_way(config, build, None, furthest=Way.PACKED)
    assert torch.equal(torch.random.get_rng_state(), before)
