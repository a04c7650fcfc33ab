"""Sequences that share a row must not see each other; what mixes them is found by asking the model."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.models.architectures import ARCHITECTURES, build_random
from verl.workers.hf.packing import BY_SEQUENCE, LENGTHS, attend_sequences_apart, keeps_sequences_apart

pytestmark = pytest.mark.usefixtures("one_rank")


def with_sdpa(name, **changes):
    torch.manual_seed(0)
    config = ARCHITECTURES[name].make_config()
    for key, value in changes.items():
        setattr(config, key, value)
    return AutoModelForCausalLM.from_config(config, attn_implementation="sdpa").eval()


@pytest.mark.parametrize("name", ["qwen3", "mistral", "qwen3_moe", "deepseek_v3"])
def test_attention_by_sequence_equals_each_sequence_by_itself(name):
    model = with_sdpa(name)
    lengths = [5, 40, 1, 17]
    sequences = [torch.randint(0, 250, (1, length)) for length in lengths]
    with torch.no_grad():
        apart = torch.cat([model(ids, use_cache=False).logits for ids in sequences], dim=1)
        attend_sequences_apart(model)
        assert model.config._attn_implementation == BY_SEQUENCE
        packed = model(
            torch.cat(sequences, dim=1),
            position_ids=torch.cat([torch.arange(length) for length in lengths])[None],
            use_cache=False,
            **{LENGTHS: lengths},
        ).logits
    torch.testing.assert_close(packed, apart, rtol=0, atol=1e-5)


@pytest.mark.parametrize("name", ["qwen3", "gemma2", "mixtral"])
def test_models_with_attention_alone_keep_sequences_apart(name):
    assert keeps_sequences_apart(build_random(ARCHITECTURES[name], 0).eval(), torch.device("cpu"))


@pytest.mark.parametrize("name", ["mamba2", "jamba", "lfm2", "minimax", "bloom", "gpt_oss"])
def test_states_convolutions_and_masks_without_positions_are_found(name):
    assert not keeps_sequences_apart(build_random(ARCHITECTURES[name], 0).eval(), torch.device("cpu"))


def test_models_without_fused_attention_are_left_alone():
    model = build_random(ARCHITECTURES["gemma2"], 0)
    attend_sequences_apart(model)
    assert model.config._attn_implementation == "eager"
