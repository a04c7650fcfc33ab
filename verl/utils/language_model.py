"""What is trained of a checkpoint that is more than a language model: that alone, or the whole model, which sees."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from verl.compat.transformers import has_head_of_its_own

if TYPE_CHECKING:
    from transformers import PretrainedConfig

WRAPPERS = ("gemma3", "gemma4", "llama4", "mistral3", "qwen3_5", "qwen3_5_moe")
"""Architectures (`model_type`) around a causal language model that transformers can also build by itself. From text it
then computes the same: each has a row in `tests/models/configurations.py`, whose tests compare the two."""

SEEING = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl")
"""Architectures that are trained whole, with their vision tower, and see the pictures of prompts."""


def sees(config: PretrainedConfig) -> bool:
    """Whether the model of `config` is trained with pictures."""
    return config.model_type in SEEING


def directory_sees(directory: str | Path) -> bool:
    """Whether `config.json` in it is of such a model. Reads no more; False for anything that is no such directory."""
    try:
        found = json.loads((Path(directory).expanduser() / "config.json").read_text())
    except (OSError, ValueError):
        return False
    return isinstance(found, dict) and found.get("model_type") in SEEING


def is_wrapper(config: PretrainedConfig) -> bool:
    """Whether the model of `config` is one of those, with more than a language model in its checkpoint."""
    return config.model_type in WRAPPERS


def language_config(config: PretrainedConfig) -> PretrainedConfig:
    """The configuration of the language model alone: `config` itself unless that is of a wrapper."""
    if not is_wrapper(config):
        return config
    text = copy.deepcopy(config.get_text_config())
    if has_head_of_its_own(config):  # then it is the wrapper that says whether that is the embedding
        text.tie_word_embeddings = config.tie_word_embeddings
    return text


def auto_class(config: PretrainedConfig) -> Any:
    """The class of transformers that builds the whole model of a checkpoint."""
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

    return AutoModelForImageTextToText if is_wrapper(config) or sees(config) else AutoModelForCausalLM
