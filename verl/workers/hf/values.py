"""A value for every token from a model for which transformers has no such head: its body under a linear layer."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import nn
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
    MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING,
    MODEL_MAPPING,
    AutoModelForTokenClassification,
    PretrainedConfig,
    PreTrainedModel,
)
from transformers.conversion_mapping import (
    get_checkpoint_conversion_mapping,
    register_checkpoint_conversion_mapping,
)
from transformers.modeling_layers import GenericForTokenClassification
from transformers.modeling_outputs import TokenClassifierOutput

from verl.compat.transformers import ignored_patterns
from verl.utils.language_model import sees


def register_value_head(config: PretrainedConfig) -> None:
    """Let `AutoModelForTokenClassification` build a model of `config` with a layer `score`, in this process.

    transformers' own class stays where it has such a layer over the body that causal models have. A model that sees
    keeps its vision tower.
    """
    kind = type(config)
    if _whole_class(config) is None or kind not in MODEL_MAPPING:
        return  # it comes with code of its own, which may have such a class
    if kind in MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING:
        found: Any = MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING[kind]
        if issubclass(found, GenericForTokenClassification | _TokenValues):
            return
    AutoModelForTokenClassification.register(kind, _value_class(config), exist_ok=True)


class _TokenValues:
    """What the classes of `_value_class` have in common. `logits` [b, s, num_labels] of the last hidden states."""

    body_class: type[PreTrainedModel]
    body_name: str

    def __init__(self, config: PretrainedConfig) -> None:
        super().__init__(config)  # type: ignore[call-arg]
        own: Any = self
        own.add_module(self.body_name, self.body_class(config))
        own.score = nn.Linear(config.get_text_config().hidden_size, config.num_labels or 1)
        own.post_init()

    def forward(self, input_ids: torch.Tensor, **inputs: Any) -> TokenClassifierOutput:
        body = getattr(self, self.body_name)
        taken = inspect.signature(self.body_class.forward).parameters
        if not any(each.kind is inspect.Parameter.VAR_KEYWORD for each in taken.values()):
            inputs = {name: value for name, value in inputs.items() if name in taken}
        own: Any = self
        return TokenClassifierOutput(logits=own.score(body(input_ids, **inputs).last_hidden_state))


def _whole_class(config: PretrainedConfig) -> Any:
    """The class of a policy of `config`; None if it is not one of transformers."""
    return (MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING if sees(config) else MODEL_FOR_CAUSAL_LM_MAPPING).get(
        type(config), None
    )


def _value_class(config: PretrainedConfig) -> type[PreTrainedModel]:
    causal = _whole_class(config)
    body: Any = MODEL_MAPPING[type(config)]
    family = next(base for base in body.__mro__[1:] if issubclass(base, PreTrainedModel))
    with torch.device("meta"):
        whole = causal(config)
    name = next(name for name, child in whole.named_children() if isinstance(child, body))
    fields = {
        "__module__": body.__module__,  # in whose source transformers looks for what its layers can do
        "config_class": type(config),
        "base_model_prefix": causal.base_model_prefix,
        "body_class": body,
        "body_name": name,
        "_keys_to_ignore_on_load_unexpected": ignored_patterns(causal),
    }
    made: type[PreTrainedModel] = type(f"{body.__name__}ForTokenValues", (_TokenValues, family), fields)
    if (rules := get_checkpoint_conversion_mapping(causal.__name__)) is not None:  # type: ignore[no-untyped-call]
        register_checkpoint_conversion_mapping(made.__name__, rules, overwrite=True)
    return made
