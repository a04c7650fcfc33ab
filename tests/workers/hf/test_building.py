"""Models without memory, whose buffers have their values."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM

from tests.models.architectures import ARCHITECTURES
from verl.checkpoint_engine.errors import PlanError
from verl.workers.hf.building import parameters_on_meta, require_buffers


def built(name):
    with parameters_on_meta():
        return AutoModelForCausalLM.from_config(ARCHITECTURES[name].make_config())


def reference(name):
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(ARCHITECTURES[name].make_config())


@pytest.mark.parametrize("name", ["gemma3_text", "llama", "deepseek_v3", "qwen3_next", "mamba2"])
def test_parameters_take_no_memory_and_buffers_are_what_a_constructor_on_the_host_gives(name):
    model = built(name)
    assert all(parameter.is_meta for parameter in model.parameters())
    whole = AutoModelForCausalLM.from_config(ARCHITECTURES[name].make_config())
    expected = dict(whole.named_buffers())
    assert expected.keys() == dict(model.named_buffers()).keys()
    assert all(torch.equal(buffer, expected[key]) for key, buffer in model.named_buffers())
    require_buffers(model, reference(name), loaded=())


def test_modules_are_as_before_when_the_block_is_left():
    with parameters_on_meta():
        pass
    assert not nn.Linear(2, 2).weight.is_meta


def test_a_buffer_that_is_not_what_transformers_computes_is_named():
    model = built("gemma3_text")
    name, buffer = next((name, buffer) for name, buffer in model.named_buffers() if name.endswith("inv_freq"))
    buffer.mul_(1.0001)
    with pytest.raises(PlanError, match=f"buffers of Gemma3ForCausalLM are not .*{name}"):
        require_buffers(model, reference("gemma3_text"), loaded=())


def test_a_buffer_that_the_checkpoint_holds_may_have_any_value():
    model = built("gemma3_text")
    name, buffer = next((name, buffer) for name, buffer in model.named_buffers() if name.endswith("inv_freq"))
    buffer.mul_(2)
    require_buffers(model, reference("gemma3_text"), loaded={name})
