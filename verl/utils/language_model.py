"""Decides which part of a multimodal checkpoint is trained: its language model alone, or the whole model."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from verl.compat.transformers import has_head_of_its_own

if TYPE_CHECKING:
    from transformers import PretrainedConfig

WRAPPERS = ("gemma3", "gemma4", "llama4", "mistral3", "qwen3_5", "qwen3_5_moe")
"""Architectures (`model_type`) around a causal language model that transformers can also build by itself. On text both
compute the same: tests compare them for each row of `tests/models/configurations.py`."""

SEEING = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl")
"""Architectures that are trained as a whole, with their vision tower, on prompts with pictures."""


def sees(config: PretrainedConfig) -> bool:
    """Whether the model of `config` is trained with pictures."""
    return config.model_type in SEEING


def directory_sees(directory: str | Path) -> bool:
    """Whether the directory's `config.json` is of such a model; False without one. Reads no other file."""
    return _described(directory).get("model_type") in SEEING


def patch_pixels(directory: str | Path) -> int | None:
    """On a side of a patch of a picture, as `config.json` in it says; None for anything that says nothing of it."""
    vision = _described(directory).get("vision_config")
    found = vision.get("patch_size") if isinstance(vision, dict) else None
    return found if isinstance(found, int) else None


def _described(directory: str | Path) -> dict[str, Any]:
    try:
        found = json.loads((Path(directory).expanduser() / "config.json").read_text())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def is_wrapper(config: PretrainedConfig) -> bool:
    """Whether the model of `config` is one of WRAPPERS, with more than a language model in its checkpoint."""
    return config.model_type in WRAPPERS


def language_config(config: PretrainedConfig) -> PretrainedConfig:
    """The configuration of the language model alone; `config` itself unless it is a wrapper's."""
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
