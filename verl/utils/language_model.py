"""The causal language model in a checkpoint, where that is of a model which also sees or hears."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

from verl.compat.transformers import has_head_of_its_own

if TYPE_CHECKING:
    from transformers import PretrainedConfig

WRAPPERS = ("gemma3", "gemma4", "llama4", "mistral3", "qwen3_5", "qwen3_5_moe")
"""Architectures (`model_type`) around a causal language model that transformers can also build by itself. From text it
then computes the same: each has a row in `tests/models/configurations.py`, whose tests compare the two."""


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

    return AutoModelForImageTextToText if is_wrapper(config) else AutoModelForCausalLM
