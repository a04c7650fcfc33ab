"""Tiny models of the families whose faults are named."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

from verl.utils.builtin import make_tiny_model
from verl.utils.builtin.tiny import vary_vectors

GEMMA = {
    "vocab_size": 64,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "query_pre_attn_scalar": 24,
    "sliding_window": 16,
    "layer_types": ["sliding_attention", "full_attention"],
    "max_position_embeddings": 512,
    "initializer_range": 0.2,
}
FAMILIES = ("qwen2", "qwen3", "llama", "gemma2", "gemma3_text", "qwen3_moe")


def make(directory: Path, family: str) -> Path:
    """Write a model of `family` with random weights to `directory`."""
    if not family.startswith("gemma"):
        return _sharpened(make_tiny_model(directory, family))
    caps = {"attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0} if family == "gemma2" else {}
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **GEMMA, **caps))
    vary_vectors(model, 0)
    model.save_pretrained(directory)
    return directory


def _sharpened(directory: Path) -> Path:
    """With larger weights: attention that sees all tokens nearly alike would hide another scale."""
    for file in directory.glob("*.safetensors"):
        tensors = {name: tensor * 5 if tensor.dim() > 1 else tensor for name, tensor in load_file(file).items()}
        save_file(tensors, file, metadata={"format": "pt"})
    return directory
