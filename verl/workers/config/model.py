"""The `actor_rollout_ref.model` section."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from verl.utils.config import option


@dataclass(frozen=True, kw_only=True)
class HFModelConfig:
    """The policy model: a local Hugging Face causal-LM directory, or a built-in one."""

    path: str = option("builtin:tiny-qwen2", "local Hugging Face directory, or builtin:tiny-qwen2 (made on first use)")
    tokenizer_path: str | None = option(None, "tokenizer directory; null: the model's")
    trust_remote_code: bool = option(False, "allow code from the model directory")
    external_lib: str | None = option(None, "module imported before the model is built")
    override_config: dict[str, Any] = option({}, "fields of the Hugging Face config to replace")
    custom_chat_template: str | None = option(None, "Jinja chat template that replaces the tokenizer's")
    enable_gradient_checkpointing: bool = option(False, "recompute activations in the backward pass (verl: true)")
