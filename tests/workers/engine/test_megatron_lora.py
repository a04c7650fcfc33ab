"""LoRA on Megatron: the same adapters as FSDP2's, however ranks cut the layers beside which they are."""

from __future__ import annotations

import math

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from tests.workers.engine.engine_cases import assemble, assert_same_weights, batch, held_parts, make_engine
from tests.workers.engine.megatron_cases import (
    CONTENTS,
    EP2,
    PP2,
    SEQUENCE,
    SMALL,
    TP2,
    WHOLE_EXPERTS,
    collectives,
    make_megatron,
    own_rows,
    tiny_moe,
    train,
)
from verl.utils.config import ConfigError
from verl.utils.model import load_hf_config
from verl.workers.config import HFModelConfig
from verl.workers.config.model import LoRAConfig
from verl.workers.engine.fsdp.model import adapter_shapes
from verl.workers.engine.megatron.adapted import with_adapters

LORA = {"lora_rank": 3, "lora_alpha": 12}
LAYOUTS = [
    pytest.param("qwen2", True, 1, {}, {}, id="one rank"),
    pytest.param("qwen3", True, 2, TP2, {}, id="two tensor-parallel ranks"),
    pytest.param("qwen2", True, 2, PP2 | {"recompute": True}, {}, id="two stages, recomputed"),
    pytest.param(
        "llama", False, 4, TP2 | PP2 | SEQUENCE | {"recompute": True}, {}, id="two stages of two ranks, recomputed"
    ),
    pytest.param(
        "qwen2", True, 2, {"use_distributed_optimizer": True}, {}, id="two ranks with a half of the data each"
    ),
    pytest.param("qwen3_moe", False, 2, TP2 | SEQUENCE | EP2 | WHOLE_EXPERTS, {}, id="beside experts"),
    pytest.param("qwen2", True, 2, TP2, {"target_modules": ["q_proj", "v_proj", "up_proj"]}, id="parts of layers"),
]


@pytest.fixture(scope="module")
def moe(tmp_path_factory):
    return tiny_moe(tmp_path_factory.mktemp("moe") / "model")


def whole_life(path, directory, options, model):
    """With FSDP2 where `options` are None: new adapters, two steps, a checkpoint, a third step, an export."""
    engine = _make(path, options, model)
    engine.save_checkpoint(directory / "new", ("model",))
    first = held_parts(engine)
    train(engine, (0, 1))
    log_probs = engine.compute_log_prob(own_rows(batch(12)), temperature=0.7, limits=SMALL, calculate_entropy=True)
    engine.save_checkpoint(directory / "step", CONTENTS)
    saved, metrics = held_parts(engine), train(engine, (2,))
    before, trained = collectives(), held_parts(engine)
    communicated = collectives() - before
    engine.export_hf(directory / "hf", "float32")
    return {
        "first": first,
        "log_probs": log_probs,
        "saved": saved,
        "metrics": metrics,
        "trained": trained,
        "collectives": communicated,
    }


def resumed(path, directory, options, model):
    engine = _make(path, options, model)
    engine.load_checkpoint(directory / "step", CONTENTS)
    return {"saved": held_parts(engine), "metrics": train(engine, (2,)), "trained": held_parts(engine)}


def _make(path, options, model):
    if options is not None:
        return make_megatron(path, options, model=LORA | model)
    return make_engine(
        path, model=LORA | model, optim={"lr_warmup_steps": 2, "zero_indexed_step": False}, grad_clip=0.5
    )


def adapters_in(directory):
    return load_file(directory / "lora_adapter/adapter_model.safetensors")


@pytest.mark.parametrize(("architecture", "tied", "world_size", "options", "model"), LAYOUTS)
def test_a_layout_computes_trains_exports_and_resumes_the_adapters_of_fsdp2(
    ranks, models, moe, tmp_path, architecture, tied, world_size, options, model
):
    path = moe if architecture == "qwen3_moe" else models(architecture, tied)
    here, there = tmp_path / "megatron", tmp_path / "fsdp2"
    (expected,) = ranks.run(whole_life, 1, path, there, None, model)
    life = ranks.run(whole_life, world_size, path, here, options, model)

    new = adapters_in(here / "new")
    assert new.keys() == adapters_in(there / "new").keys()
    assert all(torch.equal(value, new[name]) for name, value in adapters_in(there / "new").items())
    for place in (0, 1):
        found = torch.cat([rank["log_probs"][place] for rank in life])
        torch.testing.assert_close(found, expected["log_probs"][place], rtol=1e-4, atol=1e-4)
    for rank in life:
        for name in ("loss", "grad_norm"):
            assert rank["metrics"][name] == pytest.approx(expected["metrics"][name], rel=1e-4)
        assert rank["collectives"] == 0, "the weight source communicated"
    first, trained = (assemble([rank[when] for rank in life]) for when in ("first", "trained"))
    base = assemble([expected["first"]])
    assert all(torch.equal(first[name], base[name]) for name in base), "a new adapter adds nothing"
    assert_same_weights(trained, assemble([expected["trained"]]))
    assert any(not torch.equal(trained[name], base[name]) for name in base)
    assert_same_weights(adapters_in(here / "step"), adapters_in(there / "step"))
    exported = load_file(here / "hf" / "model.safetensors")
    assert exported.keys() == trained.keys()
    for name, value in exported.items():
        torch.testing.assert_close(value, trained[name], rtol=1e-6, atol=1e-7)

    for rank, other in zip(life, ranks.run(resumed, world_size, path, here, options, model), strict=True):
        for when in ("saved", "trained"):
            assert all(torch.equal(one[2], two[2]) for one, two in zip(rank[when], other[when], strict=True))
        assert other["metrics"] == rank["metrics"]


def test_another_layout_goes_on_from_a_checkpoint(ranks, models, tmp_path):
    path = models("qwen3")
    life = ranks.run(whole_life, 2, path, tmp_path, TP2, {})
    again = ranks.run(resumed, 4, path, tmp_path, PP2, {})
    for when in ("saved", "trained"):
        found, expected = (assemble([rank[when] for rank in result]) for result in (again, life))
        assert_same_weights(found, expected)


def train_adapters(path, directory, options):
    engine = make_megatron(path, options, model=LORA | {"lora": LoRAConfig(merge=False)})
    train(engine, (0, 1))
    engine.save_checkpoint(directory, ("model",))
    return held_parts(engine)


def test_adapters_are_sent_alone_as_peft_names_them_and_each_rank_sends_what_it_holds(ranks, models, tmp_path):
    sent = assemble(ranks.run(train_adapters, 2, models("qwen2"), tmp_path, TP2))
    saved = adapters_in(tmp_path)
    assert sent.keys() == saved.keys()
    assert all(torch.equal(sent[name], value) for name, value in saved.items())


def kept_of_a_model_in_bfloat16(path, options):
    """Elements that are kept beside the model's own, after a step; log-probs before it."""
    engine = make_megatron(path, options | {"dtype": "bfloat16"}, model=LORA)
    log_probs = engine.compute_log_prob(own_rows(batch(12)), temperature=1.0, limits=SMALL)[0]
    train(engine, (0,))
    own = {id(parameter) for parameter in engine.model.parameters()}
    weights = engine._built_model.weights.tensors
    return sum(weight.numel() for weight in weights.values() if id(weight) not in own), log_probs


def test_of_frozen_weights_that_are_computed_with_as_they_are_in_the_files_no_copies_are_kept(ranks, models, tmp_path):
    path = models("qwen2")
    numel = sum(map(math.prod, adapter_shapes(HFModelConfig(path=str(path), **LORA)).values()))
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16)
    model.save_pretrained(tmp_path)
    (kept, log_probs), (more, expected) = (
        ranks.run(kept_of_a_model_in_bfloat16, 1, at, {})[0] for at in (tmp_path, path)
    )
    assert kept == numel
    assert more >= numel + sum(parameter.numel() for parameter in model.parameters())
    torch.testing.assert_close(log_probs, expected, atol=0.05, rtol=0.0)


def error_of_loading(path, directory, model):
    engine = make_megatron(path, {}, model=model)
    with pytest.raises(ConfigError) as caught:
        engine.load_checkpoint(directory, CONTENTS)
    return str(caught.value)


def test_a_checkpoint_of_other_adapters_or_of_a_whole_model_is_refused(ranks, models, tmp_path):
    path = models("qwen2")
    ranks.run(whole_life, 1, path, tmp_path, {}, {})
    for model in (LORA | {"lora_rank": 4}, LORA | {"target_modules": ["o_proj"]}, {}):
        assert "adapters" in ranks.run(error_of_loading, 1, path, tmp_path / "step", model)[0]


def shapes_of(path, targets):
    config = HFModelConfig(path=str(path), **LORA, target_modules=targets)
    return with_adapters(config, load_hf_config(config))[1]


def test_layers_may_be_called_as_megatron_calls_them(models):
    path = models("qwen2")
    both = ["linear_qkv", "linear_proj", "linear_fc1", "linear_fc2"]
    assert shapes_of(path, both) == shapes_of(path, "all-linear")
    assert shapes_of(path, ["linear_q", "linear_fc1_up"]) == shapes_of(path, ["q_proj", "up_proj"])


@pytest.mark.parametrize(
    ("architecture", "targets", "part"),
    [
        ("qwen3_moe", ["linear_qkv", "linear_fc1"], "linear_fc1 of qwen3_moe are experts"),
        ("llama", ["q_proj", "lm_head"], "no adapters for lm_head"),
        ("llama", r".*\.0\.self_attn\.q_proj", "q_proj of some blocks"),
        ("llama", ["q_prj"], "q_prj"),
    ],
)
def test_what_cannot_have_adapters_is_refused_on_the_driver(models, moe, architecture, targets, part):
    path = moe if architecture == "qwen3_moe" else models(architecture, False)
    with pytest.raises(ConfigError) as caught:
        shapes_of(path, targets)
    assert part in str(caught.value)
