"""LoRA beside every linear layer of every architecture: which layers, and that what is exported is what was trained."""

from __future__ import annotations

import logging

import pytest
import torch
from peft import LoraConfig
from peft.tuners.tuners_utils import _maybe_include_all_linear_layers
from torch import nn
from transformers import AutoModelForCausalLM

from tests.models import cases
from tests.models.architectures import ARCHITECTURES, write_checkpoint
from tests.models.configurations import WRAPPERS
from tests.workers.engine.engine_cases import make_engine
from verl.utils.config import ConfigError
from verl.workers.config import HFModelConfig
from verl.workers.engine.adapters import add_adapters
from verl.workers.engine.micro_batches import MicroBatchLimits

ROUTERS = {"phimoe": "mlp.router", "llama4_text": "feed_forward.router", "longcat_flash": "router.classifier"}
"""Derived from linear layers, or never called: they choose experts."""
READ = {
    **dict.fromkeys(("mamba", "falcon_mamba"), ("x_proj", "dt_proj", "mixer.out_proj")),
    **dict.fromkeys(("mamba2", "nemotron_h"), ("mixer.out_proj",)),
    **dict.fromkeys(("bamba", "falcon_h1", "granitemoehybrid", "zamba2"), ("mamba.out_proj",)),
    "jamba": ("mamba.dt_proj",),
    "deepseek_v4": ("self_attn.o_a_proj",),
    "zamba": tuple(f"{name}_proj" for name in ("q", "k", "v", "o", "gate", "up", "down")),
}
"""Linear layers whose weights are read by others: by kernels of state-space layers, in groups, or shared by layers."""
NAMES = [name for name in ARCHITECTURES if "-" not in name and name != "gpt2" and name not in WRAPPERS]


pytestmark = pytest.mark.usefixtures("one_rank")


def without_memory(name: str):
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(ARCHITECTURES[name].make_config())


def with_peft(model) -> set[str]:
    """The layers that peft's own `all-linear` means, before its rules for single architectures."""
    config = _maybe_include_all_linear_layers(LoraConfig(target_modules="all-linear", task_type="CAUSAL_LM"), model)
    targets = config.target_modules
    return {
        name
        for name, _ in model.named_modules()
        if any(name == target or name.endswith(f".{target}") for target in targets)
    }


@pytest.mark.parametrize("name", NAMES)
def test_all_linear_is_that_of_peft_without_routers_and_what_is_only_read(name):
    model = without_memory(name)
    expected = with_peft(model)
    left_out = {layer for layer in expected if layer.endswith((ROUTERS.get(name, "none"), *READ.get(name, ())))}
    assert bool(left_out) == (name in ROUTERS or name in READ)
    assert set(add_adapters(model, HFModelConfig(path="x", lora_rank=2))) == expected - left_out


def test_shared_experts_have_adapters_and_stacked_ones_are_named(caplog):
    with caplog.at_level(logging.INFO):
        layers = add_adapters(without_memory("deepseek_v3"), HFModelConfig(path="x", lora_rank=2))
    assert [layer for layer in layers if "shared_experts" in layer]
    assert (
        "no adapters beside model.layers.*.mlp.experts.gate_up_proj, model.layers.*.mlp.experts.down_proj"
        in caplog.text
    )


def test_layers_that_share_their_weights_have_no_adapters_and_are_named(caplog):
    config = ARCHITECTURES["zamba2"].make_config()
    config.num_hidden_layers, config.layers_block_type = 4, ["mamba", "hybrid", "mamba", "hybrid"]
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    with caplog.at_level(logging.INFO):
        layers = add_adapters(model, HFModelConfig(path="x", lora_rank=2))
    assert layers
    assert [layer for layer in layers if "shared_transformer" in layer] == []
    assert "no adapters beside" in caplog.text
    assert "model.layers.*.shared_transformer.self_attn.q_proj.weight" in caplog.text


@pytest.mark.parametrize(
    ("name", "targets", "said"),
    [
        ("gpt2", "all-linear", "has no linear layer of that kind: its layers are transposed"),
        ("gpt2", ["c_attn"], "linear layers with weights of their own, not transformer.h.0.attn.c_attn"),
        ("mamba", ["in_proj", "x_proj"], "backbone.layers.0.mixer.x_proj.* reads their weights itself"),
        ("qwen3", ["q_proj", "w_proj"], "has no linear layer w_proj"),
        ("qwen3", r".*\.w_proj", "has no linear layer of that kind"),
        ("llama4_text", ["router"], "not model.layers.1.feed_forward.router"),
    ],
)
def test_what_cannot_have_an_adapter_is_named(name, targets, said):
    with pytest.raises(ConfigError, match=said):
        add_adapters(without_memory(name), HFModelConfig(path="x", lora_rank=2, target_modules=targets))


def test_a_regular_expression_is_one_of_whole_names():
    config = HFModelConfig(path="x", lora_rank=2, target_modules=r"model\.layers\.1\..*shared_experts\.\w+_proj")
    layers = add_adapters(without_memory("deepseek_v3"), config)
    assert layers == [f"model.layers.1.mlp.shared_experts.{name}_proj" for name in ("gate", "up", "down")]


@pytest.mark.parametrize("name", ["deepseek_v3", "qwen3_next", "falcon", "mamba2", "bamba", "jamba"])
def test_after_steps_an_export_computes_what_the_adapted_model_does(name, tmp_path):
    write_checkpoint(ARCHITECTURES[name], tmp_path / "model")
    engine = make_engine(tmp_path / "model", model={"lora_rank": 2, "lora_alpha": 64}, grad_clip=1e9)
    data = cases.padded_batch()
    before = cases.log_probs(engine, data)
    for _ in range(2):
        engine.train_mini_batch(
            data,
            lambda log_prob, entropy, micro_batch, totals: (log_prob.sum(), {}),
            temperature=1.0,
            limits=MicroBatchLimits(max_sequences=len(data)),
        )
    after = cases.log_probs(engine, data)
    assert (after - before).abs().max() > 0.1
    untrained = [
        name
        for name, parameter in engine.model.named_parameters()
        if name.endswith("lora_B.default.weight") and not parameter.full_tensor().any()
    ]
    assert untrained == []
    engine.export_hf(tmp_path / "export")
    reference, info = cases.reference(tmp_path / "export")
    assert info == {}
    assert after == pytest.approx(cases.reference_log_probs(reference, data), abs=2e-4)


def test_linear_layers_of_a_class_of_their_own_are_adapted():
    model = without_memory("falcon")
    assert all(type(module) is not nn.Linear for name, module in model.named_modules() if name.endswith("dense"))
    assert "transformer.h.0.self_attention.dense" in add_adapters(model, HFModelConfig(path="x", lora_rank=2))
