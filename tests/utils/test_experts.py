from __future__ import annotations

import pytest
import torch
import transformers
from safetensors.torch import load_file

from verl.utils.experts import STACKED, expert_matrices

SMALL = {
    "vocab_size": 8,
    "hidden_size": 6,
    "intermediate_size": 10,
    "moe_intermediate_size": 5,
    "shared_expert_intermediate_size": 4,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "num_experts": 3,
    "num_experts_per_tok": 2,
}


@pytest.mark.parametrize("model_type", STACKED)
def test_the_experts_of_every_known_architecture_are_found_as_transformers_saves_them(tmp_path, model_type):
    model = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.for_model(model_type, **SMALL))
    model.save_pretrained(tmp_path)
    found = {}
    for name, parameter in model.named_parameters():
        matrices = expert_matrices(model_type, name, parameter.shape)
        found |= {one.name: parameter[one.expert, one.first : one.last] for one in matrices} or {name: parameter}
    saved = load_file(tmp_path / "model.safetensors")
    assert found.keys() == saved.keys()
    assert sum("experts" in name for name in saved) == 2 * 3 * 3
    assert [name for name, tensor in saved.items() if not torch.equal(tensor, found[name])] == []


def test_what_is_not_stacked_stays_as_it_is():
    assert expert_matrices("qwen3_moe", "model.layers.0.mlp.gate.weight", (4, 6)) == ()
    assert expert_matrices("qwen3", "model.layers.0.mlp.experts.down_proj", (4, 6, 5)) == ()
