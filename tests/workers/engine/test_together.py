"""A sequence has the log-probs and gradients that it has alone in Hugging Face's eager model, whoever shares its batch.

The models here see some of their tokens (chosen by a score, in chunks of the row, ...), or place them by the longest
sequence of a call. The sequences are longer than all that.
"""

from __future__ import annotations

import copy
import re
from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from tests.models import cases
from tests.models.architectures import ARCHITECTURES, Architecture, write_checkpoint
from tests.models.configurations import ORIGINAL, stretched
from tests.workers.engine.engine_cases import make_engine
from verl.utils.config import ConfigError
from verl.workers.config import FSDPConfig, HFModelConfig
from verl.workers.engine.fsdp.checks import check_job
from verl.workers.engine.micro_batches import MicroBatchLimits
from verl.workers.hf.attention import attention_implementation
from verl.workers.hf.probing import Finding, Probe, Way, answered, find_way
from verl.workers.rollout.hf.decoding import Found, find_decoding

TIES = {"index_n_heads": 1}
"""Scores of keys are 0 where no head likes them. Which of those are chosen depends on how long a row is."""


def variant(name: str, **more) -> Architecture:
    """Of one of the matrix."""
    known = ARCHITECTURES[name]
    return replace(known, config=known.config | more)


VARIANTS = {
    "deepseek_v32 with ties": variant("deepseek_v32", **TIES),
    "doge": variant("doge", keep_window_size=4),
    "llama4 without tuning": variant("llama4_text", attention_chunk_size=8, attn_temperature_tuning=False),
    "longrope with scales": variant("phimoe", **stretched("longrope", short_mscale=1.1, long_mscale=1.4)),
    "by kinds of layers": variant(
        "gemma3_text",
        max_position_embeddings=ORIGINAL,
        rope_parameters={
            "full_attention": stretched("longrope")["rope_parameters"],
            "sliding_attention": stretched("dynamic")["rope_parameters"],
        },
    ),
    "zamba2 with shared attention": variant(
        "zamba2", num_hidden_layers=4, layers_block_type=["mamba", "hybrid", "mamba", "hybrid"], num_mem_blocks=1
    ),
}
MODELS = {
    **{name: ARCHITECTURES[name] for name in ("deepseek_v32", "glm_moe_dsa", "axk2", "hy_v4")},
    **VARIANTS,
    "longrope": ARCHITECTURES["phi3-longrope"],
    "dynamic": ARCHITECTURES["llama-dynamic"],
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
    "by kinds of layers": Way.PACKED,
    "zamba2 with shared attention": Way.ROWS,
    "dynamic": Way.PACKED,
}
"""How far sequences may go together: what is safe, and no slower."""
ALL_IN_ONE = MicroBatchLimits(max_sequences=4)
TWO = MicroBatchLimits(max_sequences=2)


pytestmark = pytest.mark.usefixtures("one_rank")
of_whole_models = pytest.mark.cells(4, by="directory")


@pytest.fixture(scope="module", params=MODELS)
def directory(request, tmp_path_factory):
    found = tmp_path_factory.mktemp("model")
    write_checkpoint(MODELS[request.param], found)
    return found


@pytest.fixture(scope="module", params=["rows", "packed"])
def engine(directory, request):
    return make_engine(directory, model={"use_remove_padding": request.param == "packed"})


def build(config, implementation):
    asked = {"attn_implementation": implementation} if implementation else {}
    return AutoModelForCausalLM.from_config(copy.deepcopy(config), dtype=torch.float32, **asked)


@pytest.mark.parametrize("limits", [ALL_IN_ONE, TWO], ids=["one micro-batch", "two"])
@of_whole_models
def test_log_probs_are_those_of_each_sequence_alone(directory, engine, limits):
    data, model = cases.padded_batch(), cases.reference(directory)[0]
    for order in ([0, 1, 2, 3], [3, 1, 0, 2], [2, 1]):
        found = engine.compute_log_prob(data[order], temperature=1.0, limits=limits)[0]
        torch.testing.assert_close(found, cases.reference_log_probs(model, data[order]), rtol=0, atol=1e-4)


@of_whole_models
def test_gradients_are_those_of_the_sequences_alone(directory, engine):
    data = cases.padded_batch()
    saved = {name: tensor.clone() for name, tensor in engine.snapshot().items()}
    found = cases.gradients(engine, data)
    engine.restore(saved)
    assert cases.other_gradients(found, cases.reference_gradients(cases.reference(directory)[0], data)) == {}


@of_whole_models
async def test_decoded_tokens_have_the_log_probs_of_what_is_before_them_alone(directory):
    model = cases.reference(directory)[0]
    for together in await cases.decoded(directory, cases.ORDERS):
        for prompt, output in together:
            expected = cases.foretold_as_it_grows(lambda: copy.deepcopy(model), prompt, output.token_ids)
            torch.testing.assert_close(torch.tensor(output.log_probs), expected, rtol=0, atol=1e-4)


@pytest.mark.parametrize("name", MODELS)
def test_sequences_go_together_as_far_as_a_small_model_keeps_them_as_they_are(name):
    config = MODELS[name].make_config()
    found = find_way(config, build, attention_implementation(config), furthest=Way.PACKED)
    assert found.way is WAYS[name], found.why


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("deepseek_v32", "a sequence changes in DeepseekV32ForCausalLM with its place in a row"),
        ("llama4_text", "Llama4ForCausalLM mixes sequences that are in one row"),
        ("qwen3_next", "Qwen3NextForCausalLM mixes sequences that are in one row"),
    ],
)
def test_who_insists_on_packing_is_told_why_a_model_cannot_be_packed(tmp_path, name, why):
    write_checkpoint(ARCHITECTURES[name], tmp_path)
    with pytest.raises(ConfigError, match=rf"require_remove_padding=true, and .* without padding: {why}"):
        make_engine(tmp_path, model={"use_remove_padding": True, "require_remove_padding": True})


def test_who_insists_on_packing_gets_it_where_it_changes_nothing(tmp_path):
    write_checkpoint(ARCHITECTURES["qwen3"], tmp_path)
    assert make_engine(tmp_path, model={"use_remove_padding": True, "require_remove_padding": True})._packs


@pytest.mark.parametrize(
    "model_type", ["falcon_h1", "zamba", "zamba2", "codegen", "bamba", "deepseek_v3", "hrm_text", "xlstm"]
)
@torch.no_grad()
def test_models_that_probes_ask_are_small(model_type):
    small = Probe.of(CONFIG_MAPPING[model_type](), build, None).model
    assert (getattr(small.config, "num_layers_per_stack", None) or small.config.num_hidden_layers) <= 4
    assert sum(parameter.numel() for parameter in small.parameters()) < 30e6


@torch.no_grad()
def test_models_whose_layers_run_several_times_have_few_in_probes():
    config = CONFIG_MAPPING["hrm_text"]()
    small = Probe.of(config, build, None).model
    layers = [module for module in small.modules() if type(module).__name__.endswith("DecoderLayer")]
    assert (config.num_layers_per_stack, len(layers)) == (16, 4)
    assert small.config.num_hidden_layers == 2 * config.H_cycles * (config.L_cycles + 1)  # slots of a cache


@torch.no_grad()
@pytest.mark.parametrize(
    "model_type", ["jamba", "bamba", "zamba", "zamba2", "nemotron_h", "qwen3_next", "recurrent_gemma"]
)
def test_models_that_probes_ask_have_layers_of_each_kind(model_type):
    """Attention is some layers' alone, which configurations say in many ways: lists of kinds, of numbers, periods."""
    more = {"attn_layer_indices": [9, 18]} if model_type == "bamba" else {}
    small = Probe.of(CONFIG_MAPPING[model_type](**more), build, None).model
    names = {type(module).__name__.lower() for module in small.modules()}
    assert any(name.endswith("attention") for name in names)
    assert any(part in name for name in names for part in ("mixer", "gateddeltanet", "recurrentblock"))


def test_a_model_that_no_probe_can_build_has_one_sequence_at_a_time_and_says_why():
    def fails(config, implementation):
        raise ValueError("no such layer")

    found = find_way(MODELS["dynamic"].make_config(), fails, "sdpa", furthest=Way.ROWS)
    assert found.way is Way.ALONE
    assert "no such layer" in found.why


@pytest.mark.parametrize("labels", [0, 1], ids=["policy", "critic"])
def test_a_model_that_computes_nothing_as_it_is_configured_is_refused_on_the_driver(tmp_path, labels):
    write_checkpoint(ARCHITECTURES["deepseek_v2"], tmp_path)
    none = HFModelConfig(path=str(tmp_path), override_config={"num_experts_per_tok": None})
    check_job(FSDPConfig(), replace(none, override_config={}), 1, "cpu", labels)
    with pytest.raises(ConfigError) as refused:
        check_job(FSDPConfig(), none, 1, "cpu", labels)
    assert re.fullmatch(
        rf"model.path={tmp_path}: DeepseekV2\w+ cannot be computed as config.json, with overrides, says: "
        r"TypeError: topk\(\): .*NoneType",
        str(refused.value),
    )


def test_who_insists_on_packing_is_refused_on_the_driver(tmp_path):
    write_checkpoint(ARCHITECTURES["deepseek_v32"], tmp_path)
    asked = HFModelConfig(path=str(tmp_path), use_remove_padding=True, require_remove_padding=True)
    with pytest.raises(ConfigError, match="require_remove_padding=true, and .* its place in a row"):
        check_job(FSDPConfig(), asked, 1, "cpu", 0)


def test_a_probe_takes_no_random_numbers_of_anybody_else():
    torch.manual_seed(3)
    before = torch.random.get_rng_state()
    config = MODELS["longrope"].make_config()
    config.rms_norm_eps = 2e-6  # asked by nobody before
    find_way(config, build, None, furthest=Way.PACKED)
    assert torch.equal(torch.random.get_rng_state(), before)


@pytest.mark.parametrize("fails", [False, True])
def test_a_probe_computes_with_one_thread_and_gives_the_others_back(fails):
    seen = []

    def find():
        seen.append(torch.get_num_threads())
        if fails:
            raise RuntimeError("out of memory")
        return Finding(Way.ROWS)

    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        with pytest.raises(RuntimeError) if fails else nullcontext():
            answered(MODELS["longrope"].make_config(), f"threads {fails}", find, Finding, lasts=False)
        assert (seen, torch.get_num_threads()) == ([1], 3)
    finally:
        torch.set_num_threads(before)


def test_a_model_that_changes_its_parameters_while_it_computes_is_refused():
    config = CONFIG_MAPPING["rwkv"]()  # as published, of 7 billion parameters
    found = find_way(config, build, None, furthest=Way.ROWS)
    assert found.way is Way.NONE
    assert "RwkvForCausalLM changes its parameters while it computes" in found.why
    assert find_decoding(config, build, None) == Found(None, found.why)


@pytest.mark.parametrize(
    ("model_type", "fields"),
    [
        ("llama", ARCHITECTURES["llama"].config | {"is_causal": False}),
        ("bert-generation", {"hidden_size": 32, "num_attention_heads": 2, "num_hidden_layers": 2}),
        ("cpmant", {"hidden_size": 32, "num_attention_heads": 2, "dim_head": 16, "num_hidden_layers": 2}),
        ("prophetnet", {"is_decoder": True, "is_encoder_decoder": False, "num_decoder_layers": 1}),
    ],
)
def test_a_model_that_looks_at_later_tokens_is_refused_whatever_its_config_says(model_type, fields):
    config = CONFIG_MAPPING[model_type](**fields)
    found = find_way(config, build, None, furthest=Way.PACKED)
    assert found.way is Way.NONE
    assert "also looks at the tokens behind one, which are not there when it is sampled" in found.why
    assert find_decoding(config, build, None) == Found(None, found.why)
