"""Decides which part of a multimodal checkpoint is trained: its language model alone, or the whole model."""

from __future__ import annotations

import copy
import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from verl.compat.transformers import has_head_of_its_own
from verl.utils.config import ConfigError

if TYPE_CHECKING:
    from transformers import PretrainedConfig

WRAPPERS = ("gemma3", "gemma4", "llama4", "mistral3", "qwen3_5", "qwen3_5_moe")
"""Architectures (`model_type`) around a causal language model that transformers can also build by itself. On text both
compute the same: tests compare them for each row of `tests/models/configurations.py`."""

SEEING = (
    "qwen2_vl",
    "qwen2_5_vl",
    "qwen3_vl",
    "qwen3_vl_moe",
    "glm4v",
    "internvl",
    "llava",
    "llava_next",
    "smolvlm",
    "qwen3_5",
    "qwen3_5_moe",
    "gemma3",
    "gemma4",
    "mistral3",
)
"""Architectures that can be trained as a whole, with their vision tower, on prompts with pictures. Those that are in
WRAPPERS, too, are where `model.language_model_only=false`. Tests compare each of them with transformers alone."""
WITH_VIDEOS = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe")
"""Those of SEEING that are trained with videos, too."""
PARTLY_COMPUTED = ("gemma3", "llava", "llava_next")
"""Those of SEEING whose towers have layers of which nothing is used. FSDP1 loses the parameters of such layers."""
CAUSAL = "on CPUs it lets tokens of a picture see earlier ones alone, and accelerators have not been tried"
WHY_NOT_IN_VLLM = {
    "qwen3_5_moe": "on CPUs it computes experts in bfloat16 alone, and that has not been compared",
    "gemma3": CAUSAL,
    "gemma4": CAUSAL,
}
"""Those of SEEING that are refused with pictures in vLLM, and why."""
SEEING_IN_VLLM = tuple(kind for kind in SEEING if kind not in WHY_NOT_IN_VLLM)
"""Those of SEEING that vLLM serves with pictures that it gets from here. Tests compare each with transformers alone."""
WITH_VIDEOS_IN_VLLM = tuple(kind for kind in SEEING_IN_VLLM if kind in WITH_VIDEOS)
"""Those of them whose videos vLLM gets, too."""
SEEING_IN_SGLANG = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl")
"""The same of SGLang. Others have no kernels on CPUs, or differ from transformers there."""
BFLOAT16_ALONE_ON_CPU = ("qwen3_5", "qwen3_5_moe")
"""vLLM has kernels of Gated DeltaNet in no other dtype there."""
WHOLE = "verl_trains_the_whole"
"""An attribute of the configuration of one of WRAPPERS that is trained as a whole."""


def choose_part(config: PretrainedConfig, language_model_only: bool | None, key: str) -> None:
    """Mark a configuration whose model is trained as a whole although it is one of WRAPPERS. `key` is the option of
    `language_model_only`; None: WRAPPERS are trained without what sees, others with it.

    Raises ConfigError for an architecture of which that part is not trained.
    """
    kind = config.model_type
    if language_model_only is None:
        return
    if language_model_only and kind not in WRAPPERS:
        if kind in SEEING:
            raise ConfigError(f"{key}=true, and {kind} is only trained as a whole: leave it out")
        return
    if not language_model_only and kind not in SEEING:
        raise ConfigError(
            f"{key}=false, and {kind} is not trained with pictures ({', '.join(SEEING)} are): leave it out"
        )
    setattr(config, WHOLE, not language_model_only)


def sees(config: PretrainedConfig) -> bool:
    """Whether the model of `config` is trained with pictures."""
    return config.model_type in SEEING and not is_wrapper(config)


def directory_sees(directory: str | Path, kinds: Sequence[str] = SEEING, *, whole: bool = False) -> bool:
    """Whether the directory's `config.json` is of such a model, of `kinds`; False without one. Reads no other file.
    `whole`: if it is asked for."""
    kind = _described(directory).get("model_type")
    return kind in kinds and (whole or kind not in WRAPPERS)


def patch_pixels(directory: str | Path) -> int | None:
    """On a side of a patch of a picture, as `config.json` in it says; None for anything that says nothing of it."""
    vision = _described(directory).get("vision_config")
    found = vision.get("patch_size") if isinstance(vision, dict) else None
    return found if isinstance(found, int) else None


def _described(directory: str | Path) -> dict[str, Any]:
    try:
        found = json.loads((Path(directory).expanduser() / "config.json").read_text("utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def is_wrapper(config: PretrainedConfig) -> bool:
    """Whether the model of `config` is one of WRAPPERS, of whose checkpoint the language model alone is trained."""
    return config.model_type in WRAPPERS and not getattr(config, WHOLE, False)


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
