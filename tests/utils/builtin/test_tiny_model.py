import hashlib

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from verl.utils.builtin import ARCHITECTURES, make_tiny_model
from verl.utils.config import ConfigError


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("tied", [True, False])
def test_a_tiny_model_loads_and_generates_in_every_architecture(tmp_path, architecture, tied):
    directory = make_tiny_model(tmp_path / "model", architecture, tie_word_embeddings=tied)
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.bfloat16)
    tokenizer = AutoTokenizer.from_pretrained(directory)
    assert model.config.model_type == architecture
    assert (model.lm_head.weight is model.model.embed_tokens.weight) is tied
    assert any("q_norm" in name for name, _ in model.named_parameters()) is architecture.startswith("qwen3")
    assert len(tokenizer) == model.config.vocab_size
    assert (tokenizer.pad_token_id, tokenizer.eos_token_id) == (model.config.pad_token_id, model.config.eos_token_id)
    prompt = torch.tensor([tokenizer.encode("1+1=")])
    generated = model.generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=3, do_sample=False)
    assert generated.shape[1] <= prompt.shape[1] + 3


def test_the_same_seed_gives_the_same_bytes_and_another_seed_does_not(tmp_path):
    def digest(name: str, seed: int) -> str:
        directory = make_tiny_model(tmp_path / name, seed=seed)
        return hashlib.sha256((directory / "model.safetensors").read_bytes()).hexdigest()

    torch_state = torch.get_rng_state()
    assert digest("a", 0) == digest("b", 0) != digest("c", 1)
    assert torch.equal(torch.get_rng_state(), torch_state)


def test_an_unknown_architecture_is_refused_with_the_nearest_known_one(tmp_path):
    with pytest.raises(ConfigError, match="Did you mean 'qwen3'"):
        make_tiny_model(tmp_path, "qwen33")


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_the_tokenizer_takes_any_text_and_keeps_tool_calls(tmp_path, architecture):
    tokenizer = AutoTokenizer.from_pretrained(make_tiny_model(tmp_path, architecture))
    text = 'É 漢字 \x00\n  <tool_call>{"name": "f"}</tool_call>'
    ids = tokenizer.encode(text + tokenizer.eos_token, add_special_tokens=False)
    assert tokenizer.decode(ids, skip_special_tokens=True) == text


def test_the_chat_template_marks_roles_tools_and_the_turn_to_generate(tmp_path):
    tokenizer = AutoTokenizer.from_pretrained(make_tiny_model(tmp_path))
    call = {"function": {"name": "add", "arguments": {"a": 1}}}
    messages = [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "3"},
    ]
    text = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    assert text == (
        '<|user|>hi<|end|><|assistant|><tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call><|end|>'
        "<|tool|>3<|end|><|assistant|>"
    )
    offered = tokenizer.apply_chat_template(messages, tools=[{"type": "function"}], tokenize=False)
    assert offered.startswith("<|system|>") and '{"type": "function"}' in offered
