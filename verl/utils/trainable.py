"""Refuses models that cannot be trained: models that are no language models, and quantised weights."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from verl.utils.config import ConfigError
from verl.utils.language_model import language_config, sees

if TYPE_CHECKING:
    from transformers import PretrainedConfig

SENSES = {"vision": "images", "image": "images", "visual": "images", "audio": "audio", "speech": "audio"}
"""Words in the names of nested configurations."""
FILLERS = ("xlnet",)
"""Models that fill gaps in a text, beside those that transformers lists as such."""
LOAD = "AutoModelForCausalLM.from_pretrained(PATH, dtype='bfloat16'"
SAVE = ".save_pretrained(NEW, save_original_format=False)"
WRITES = {
    "fp8": f"{LOAD}, quantization_config=FineGrainedFP8Config(dequantize=True)){SAVE}",
    "mxfp4": f"{LOAD}, quantization_config=Mxfp4Config(dequantize=True)){SAVE}",
    "bitsandbytes": f"{LOAD}).dequantize(){SAVE}",
}
"""By method: transformers' call that writes a copy without quantisation. In the original format it would omit MXFP4's
experts silently, and raise for the others, whose quantisation cannot be undone."""
MERGE = "PeftModel.from_pretrained(MODEL, ADAPTERS).merge_and_unload().save_pretrained(NEW)"
SIGNS = {
    "gptq or awq": re.compile(r"\.(qweight|qzeros)$"),
    "mxfp4": re.compile(r"_(blocks|scales)$"),
    "fp8": re.compile(r"\.weight_scale(_inv)?$"),
    "compressed-tensors": re.compile(r"\.weight_(packed|shape|zero_point)$"),
    "modelopt": re.compile(r"\.weight_scale_2$"),
    "bitsandbytes": re.compile(r"\.(SCB|weight\.(absmax|quant_map|nested_absmax|quant_state\..*))$"),
}
"""By method: names of tensors that only quantised weights have."""
TRAINED = ("F64", "F32", "F16", "BF16")
"""Dtypes of trainable weights, in safetensors' notation."""

AHEAD = "also looks at the tokens behind one, which are not there when it is sampled: give a causal language model"


def require_trainable(
    config: PretrainedConfig, key: str, *, beside_model: Collection[str] = (), stored: Mapping[str, str] | None = None
) -> None:
    """Raises ConfigError, naming `key`, for a model that is no causal language model, for quantised weights, and for
    adapters that are not merged.

    `beside_model` are tensors of the files that are not the model's, `stored` the dtypes of its floating-point tensors
    in the files.
    """
    _require_unquantised(config, beside_model, stored or {}, key)
    if adapters := [name for name in beside_model if ".lora_" in name]:
        raise ConfigError(
            f"{key}: adapters are beside the weights ({adapters[0]}), and would be left out: give a merged copy, which "
            f"`{MERGE}` of peft writes"
        )
    _require_language_model(config, key)


def _require_unquantised(config: PretrainedConfig, names: Collection[str], stored: Mapping[str, str], key: str) -> None:
    method = next(_methods(vars(config)), None)
    if method is None:
        method = next((method for method, sign in SIGNS.items() for name in names if sign.search(name)), None)
    if method is None:
        method = next((f"{dtype}: {name}" for name, dtype in stored.items() if dtype not in TRAINED), None)
    if method is None:
        return
    remedy = "give the checkpoint that they were made of, or a dequantised copy"
    if how := next((text for known, text in WRITES.items() if known in method), None):
        remedy = f"give a dequantised copy, which `{how}` of transformers writes"
    raise ConfigError(
        f"{key}: the weights are quantised ({method}), and what is trained must be bfloat16, float16 or float32: "
        f"{remedy}"
    )


def _nested(fields: Mapping[str, Any]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """(name, fields) of the configurations in one, at any depth, and then of those in them."""
    for name, value in fields.items():
        inner = value if isinstance(value, Mapping) else getattr(value, "__dict__", None)
        if name.endswith("config") and inner is not None:
            yield name, inner
            yield from _nested(inner)


def _methods(fields: Mapping[str, Any]) -> Iterator[str]:
    """Of quantisations that it says."""
    for name, inner in _nested(fields):
        if name in ("quantization_config", "compression_config"):
            method = inner.get("quant_method") or "method not stated"
            yield str(getattr(method, "value", method))


def _require_language_model(config: PretrainedConfig, key: str) -> None:
    from transformers import (
        MODEL_FOR_CAUSAL_LM_MAPPING,
        MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
        MODEL_FOR_MASKED_LM_MAPPING,
        MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING,
    )

    config = language_config(config)
    what = ", ".join(getattr(config, "architectures", None) or [type(config).__name__])
    if getattr(config, "is_encoder_decoder", False):
        raise ConfigError(
            f"{key}: {config.model_type} ({what}) is an encoder with a decoder, and no causal language model"
        )
    if sees(config):
        if _looks_ahead(config.get_text_config()):
            raise ConfigError(f"{key}: {config.model_type} ({what}) {AHEAD}")
        return
    names = [name for name, _ in _nested(vars(config))]
    senses = dict.fromkeys(sense for name in names for word, sense in SENSES.items() if word in name)
    if not senses and type(config) in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING:
        senses = {"images": None}
    if senses:
        raise ConfigError(
            f"{key}: {config.model_type} ({what}) also takes {' and '.join(senses)}, which trainers and syncs do not "
            "handle yet: give a checkpoint of the language model in it, under that model's own config.json"
        )
    own = getattr(config, "auto_map", None) or {}
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING and "AutoModelForCausalLM" not in own:
        raise ConfigError(f"{key}: {config.model_type} ({what}) is no causal language model of transformers")
    if type(config) in MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING:
        raise ConfigError(
            f"{key}: {config.model_type} ({what}) is the decoder of a model with an encoder: give a causal language "
            "model of its own"
        )
    text = config.get_text_config()
    filler = type(config) in MODEL_FOR_MASKED_LM_MAPPING or config.model_type in FILLERS
    if filler or _looks_ahead(text):
        raise ConfigError(f"{key}: {config.model_type} ({what}) {AHEAD}")


def _looks_ahead(text: PretrainedConfig) -> bool:
    """Of a language model's configuration. That tokens of one picture see each other is no such thing."""
    return getattr(text, "use_bidirectional_attention", None) in (True, "all") or (
        getattr(text, "is_causal", None) is False
    )
