"""Compute how many tokens' keys and values fit into memory, for engines that need the number."""

from __future__ import annotations

from typing import Any

import torch

from verl.utils.config import ConfigError
from verl.utils.model import load_hf_config
from verl.workers.rollout.engine import EngineSpec


def kv_cache_tokens(spec: EngineSpec) -> int:
    """The tokens that fit into `rollout.cpu_kvcache_gib`. Raises ConfigError if not even one sequence fits."""
    config = load_hf_config(spec.model).get_text_config()
    tokens = tokens_in(spec.config.cpu_kvcache_gib, config, spec.config.dtype)
    if tokens < spec.max_model_len:
        raise ConfigError(
            f"{spec.name}: actor_rollout_ref.rollout.cpu_kvcache_gib={spec.config.cpu_kvcache_gib} holds the keys and "
            f"values of {tokens} tokens, fewer than one sequence has (rollout.max_model_len={spec.max_model_len})"
        )
    return tokens


def tokens_in(gib: float, config: Any, dtype: str) -> int:
    """The tokens that fit into `gib` of a KV cache of `dtype`. `config`: that of the text model."""
    heads: int = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    head_dim: int = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    itemsize: int = getattr(torch, dtype).itemsize
    tokens: int = int(gib * 2**30) // (2 * config.num_hidden_layers * heads * head_dim * itemsize)
    return tokens
