"""transformers 5.19: attributes of model classes for transformers' own loader and trainer."""

from __future__ import annotations

from collections.abc import Collection
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
    from torch import nn
    from transformers import PretrainedConfig, PreTrainedModel


def layer_names(model: PreTrainedModel) -> set[str]:
    """Classes of the decoder layers. What users are told to give FSDP by this name:
    https://github.com/huggingface/transformers/issues/24568."""
    return set(model._no_split_modules or ())


def ignored_patterns(model: Any) -> list[str]:
    """What a checkpoint may hold beside the model's tensors. Only `from_pretrained` reads it."""
    return list(getattr(model, "_keys_to_ignore_on_load_unexpected", None) or [])


def names_kept_in_float32(model: PreTrainedModel) -> set[str]:
    """Parts of the names of tensors that stay float32 in a model of any dtype. Only `from_pretrained` reads it."""
    return set(getattr(model, "_keep_in_fp32_modules_strict", None) or ())


def remembers_tokens(model: Any) -> bool:
    """Whether the model has a state beside keys and values, such as those of state-space layers."""
    return bool(model._is_stateful)


def attention(model: Any) -> str:
    """The name of the language model's attention function. Only the setter, `set_attn_implementation`, is public."""
    name: str = model.config.get_text_config()._attn_implementation
    return name


def takes_other_attention(model: PreTrainedModel) -> bool:
    """Whether the layers look their attention function up, so that a registered one can take its place."""
    return bool(model._supports_attention_backend)


def gated(experts: Any, states: torch.Tensor) -> torch.Tensor:
    """[tokens, width] from both halves, [tokens, 2 * width], as the class of the experts joins them."""
    joined: torch.Tensor = experts._apply_gate(states)
    return joined


def sort_out(model: nn.Module, *, missing: Collection[str] = (), unexpected: Collection[str] = ()) -> SimpleNamespace:
    """`missing_keys` and `unexpected_keys` without those that the model does not need or ignores.

    Only `from_pretrained`, which reads files, applies the rules of a model class.
    """
    info = SimpleNamespace(missing_keys=set(missing), unexpected_keys=set(unexpected))
    rules: Any = model
    rules._adjust_missing_and_unexpected_keys(info)
    return info


def has_head_of_its_own(config: PretrainedConfig) -> bool:
    """Whether the wrapper of `config` has the head, and not the language model in it. `config` is of a wrapper."""
    from transformers import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING

    wrapper: Any = MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING[type(config)]
    return bool(wrapper._tied_weights_keys)


def keep_parameters_as_they_are(model: PreTrainedModel) -> None:
    """`initialize_weights` then computes buffers alone. The mark is how transformers' own loader says it."""
    for parameter in model.parameters():
        parameter._is_hf_initialized = True  # type: ignore[attr-defined]
