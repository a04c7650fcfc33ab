"""The arithmetic of a training step, held against the parameters of real models."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from verl.utils.flops import COUNTED, PEAK_BFLOAT16, is_counted, peak_flops, training_flops


def parameters_per_token(config) -> float:
    """Of the matrices of a real model. transformers keeps experts as one tensor with three dimensions."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    share = config.num_experts_per_tok / config.num_experts if getattr(config, "num_experts", 0) else 0
    count = config.vocab_size * config.hidden_size  # the head, also where it is the embedding
    for name, parameter in model.named_parameters():
        if "embed_tokens" not in name and "lm_head" not in name:
            count += {1: 0, 2: 1, 3: share}[parameter.dim()] * parameter.numel()
    return count


SIZES = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 40,
}
EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "mlp_only_layers": [1]}


@pytest.mark.parametrize("architecture", COUNTED)
@pytest.mark.parametrize("tied", [True, False])
def test_every_token_costs_six_flops_for_each_parameter_that_it_meets(architecture, tied):
    fields = SIZES | (EXPERTS if "moe" in architecture else {})
    config = AutoConfig.for_model(architecture, tie_word_embeddings=tied, **fields)
    head_size = getattr(config, "head_dim", None) or 8
    attention = 12 * 3 * 4 * head_size
    expected = 6 * parameters_per_token(config) * (3 + 5) + attention * (3**2 + 5**2)
    assert training_flops(config, [3, 5]) == pytest.approx(expected)
    assert training_flops(config, []) == 0


def test_an_architecture_with_other_matrices_is_not_counted():
    assert is_counted(AutoConfig.for_model("qwen3"))
    assert not is_counted(AutoConfig.for_model("gpt2"))


def test_a_device_without_a_data_sheet_is_measured():
    assert 1e8 < peak_flops(torch.device("cpu")) < 1e15


def test_a_known_device_has_the_peak_of_its_data_sheet(monkeypatch):
    names = {
        "NVIDIA H20": "H20",
        "NVIDIA H200": "H200",
        "NVIDIA H100 80GB HBM3": "H100",
        "NVIDIA H100 PCIe": "H100 PCIe",
    }
    for name, part in names.items():
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda device, name=name: name)
        assert peak_flops(torch.device("cuda")) == PEAK_BFLOAT16[part]
