"""Tiny Hugging Face models with random weights, for tests and as the start of the built-in model."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from verl.utils.builtin.tokenizer import VOCAB_SIZE, build_tokenizer
from verl.utils.config import ConfigError, did_you_mean

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerFast

ARCHITECTURES = ("qwen2", "qwen3", "qwen3_moe", "llama")
EXPERTS = 4


def make_tiny_model(
    directory: str | Path,
    architecture: str = "qwen2",
    *,
    tie_word_embeddings: bool = False,
    hidden_size: int = 64,
    intermediate_size: int | None = None,
    layers: int = 2,
    heads: int | None = None,
    kv_heads: int = 2,
    head_dim: int = 32,
    max_position_embeddings: int = 512,
    seed: int = 0,
    dtype: str = "float32",
    device: str = "cpu",
) -> Path:
    """Write a causal LM with random weights and its tokenizer to `directory`, as `save_pretrained` does; returns it.

    The same arguments give the same bytes; `device` draws them, and a GPU makes a large model in seconds. Defaults are
    the smallest shapes that vLLM's CPU attention takes (head size 32) and that tensor parallel 2 can divide. The
    experts of a mixture have half the `intermediate_size`. Raises ConfigError for an unknown architecture.
    """
    intermediate_size = intermediate_size or 2 * hidden_size
    mixture = {
        "num_experts": EXPERTS,
        "num_experts_per_tok": EXPERTS // 2,
        "moe_intermediate_size": intermediate_size // 2,
        "norm_topk_prob": True,
    }

    tokenizer = build_tokenizer(max_position_embeddings)
    model = build_model(
        tokenizer,
        architecture,
        seed=seed,
        dtype=dtype,
        device=device,
        hidden_size=hidden_size,
        intermediate_size=intermediate_size,
        num_hidden_layers=layers,
        num_attention_heads=heads or max(hidden_size // head_dim, kv_heads),
        num_key_value_heads=kv_heads,
        head_dim=head_dim,
        tie_word_embeddings=tie_word_embeddings,
        max_position_embeddings=max_position_embeddings,
        **(mixture if architecture.endswith("_moe") else {}),
    )
    vary_vectors(model, seed)
    save_model(model, tokenizer, directory)
    return Path(directory)


def vary_vectors(model: PreTrainedModel, seed: int) -> None:
    """Add noise to every parameter of one dimension: a norm weight of all ones would hide a mixed-up tensor."""
    import torch

    with torch.no_grad():
        generator = torch.Generator().manual_seed(seed)
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(torch.randn(parameter.shape, generator=generator).to(parameter) * 0.1)


def build_model(
    tokenizer: PreTrainedTokenizerFast,
    architecture: str,
    *,
    seed: int,
    dtype: str = "float32",
    device: str = "cpu",
    **config_fields: Any,
) -> PreTrainedModel:
    """A freshly initialised causal LM on `device`; `config_fields` are of the architecture's Hugging Face config."""
    import torch
    import transformers

    if architecture not in ARCHITECTURES:
        raise ConfigError(f"unknown architecture {architecture!r}.{did_you_mean(architecture, ARCHITECTURES)}")
    config = transformers.AutoConfig.for_model(
        architecture,
        vocab_size=VOCAB_SIZE,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        **config_fields,
    )
    with torch.random.fork_rng(devices=[] if device == "cpu" else None), torch.device(device):
        torch.manual_seed(seed)
        auto: Any = transformers.AutoModelForCausalLM
        model: PreTrainedModel = auto.from_config(config, dtype=getattr(torch, dtype))
    return model


def save_model(model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, directory: str | Path) -> None:
    from transformers.utils import logging

    transformers_logging: Any = logging
    transformers_logging.disable_progress_bar()  # one small file, written at once
    try:
        model.save_pretrained(directory)
    finally:
        transformers_logging.enable_progress_bar()
    tokenizer.save_pretrained(directory)
