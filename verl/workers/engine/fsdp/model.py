"""A Hugging Face model, sharded before any weight exists, then filled with what each rank holds."""

from __future__ import annotations

import importlib
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForTokenClassification,
    PretrainedConfig,
    PreTrainedModel,
)

from verl.checkpoint_engine.errors import PlanError
from verl.utils.config import ConfigError, did_you_mean
from verl.workers.config import FSDPConfig, HFModelConfig
from verl.workers.engine.fsdp.hf_checkpoint import HFCheckpoint
from verl.workers.engine.fsdp.lora import Adapters, add_adapters, base_tensors, is_adapter
from verl.workers.engine.fsdp.mesh import DTYPES
from verl.workers.engine.fsdp.sharding import Sharding
from verl.workers.engine.fsdp.tensors import (
    HeldTensor,
    check_names,
    named_parameters,
    persistent_buffers,
    split_experts,
    tied_aliases,
)


@dataclass(frozen=True, kw_only=True)
class Head:
    """What a model computes from its last hidden states."""

    auto: Any
    """The class of transformers that builds such a model."""
    config_fields: Mapping[str, Any] = field(default_factory=dict)
    new: frozenset[str] = frozenset()
    """Tensors that the checkpoint need not have: they start at zero."""
    unused: frozenset[str] = frozenset()
    """Tensors that the checkpoint may have and the model has not."""


CAUSAL_LM = Head(auto=AutoModelForCausalLM)
TOKEN_VALUES = Head(
    auto=AutoModelForTokenClassification,
    config_fields={"num_labels": 1, "classifier_dropout": 0.0},
    new=frozenset({"score.weight", "score.bias"}),
    unused=frozenset({"lm_head.weight"}),
)
"""One number for every token. A directory of the policy will do, and so will an export of a critic."""


def build_model(
    model_config: HFModelConfig,
    fsdp_config: FSDPConfig,
    device: torch.device,
    sharding: Sharding,
    *,
    trainable: bool,
    head: Head = CAUSAL_LM,
    seed: int = 1,
) -> tuple[nn.Module, Adapters | None]:
    """The model on `device`, sharded over the default process group, with the weights of its directory. A collective.

    One that is trained with LoRA has new adapters, the same for every number of ranks.

    Raises ConfigError for a directory or configuration that cannot be used, PlanError when the tensors of the model and
    of its checkpoint differ.
    """
    directory = Path(model_config.path)
    hf_config = load_hf_config(model_config)
    for name, value in head.config_fields.items():
        setattr(hf_config, name, value)
    with HFCheckpoint(directory) as checkpoint:
        with torch.device("meta"):
            model: PreTrainedModel = head.auto.from_config(
                hf_config,
                dtype=DTYPES[fsdp_config.model_dtype],
                attn_implementation="sdpa",
                trust_remote_code=model_config.trust_remote_code,
            )
        model.requires_grad_(trainable)
        model_type = hf_config.model_type
        whole = {name: HeldTensor.whole(parameter, is_parameter=True) for name, parameter in named_parameters(model)}
        names = [*split_experts(whole, model_type), *(name for name, _ in persistent_buffers(model))]
        new = head.new - checkpoint.names
        check_names(set(names) - new, checkpoint.names, tied_aliases(model) | head.unused, type(model).__name__)
        adapted = trainable and model_config.lora_rank > 0
        if adapted:
            add_adapters(model, model_config)
        if trainable and model_config.enable_gradient_checkpointing:
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        sharded = sharding.shard(model, fsdp_config, device)
        held = sharding.held(sharded)
        _load(split_experts(base_tensors(held), model_type), checkpoint, new)
    _compute_buffers(model, device)
    if not adapted:
        return sharded, None
    adapters = Adapters(sharded, model_config)
    adapters.initialize(held, seed)
    adapters.gather()
    return sharded, adapters


def adapter_shapes(model_config: HFModelConfig) -> list[tuple[int, ...]]:
    """Of the adapters that `build_model` would make. Needs no process group and no memory for the model.

    Raises what `build_model` would raise about LoRA.
    """
    hf_config = load_hf_config(model_config)
    with torch.device("meta"):
        auto: Any = AutoModelForCausalLM
        model = auto.from_config(hf_config, trust_remote_code=model_config.trust_remote_code)
    add_adapters(model, model_config)
    return [tuple(parameter.shape) for name, parameter in model.named_parameters() if is_adapter(name)]


def load_hf_config(model_config: HFModelConfig) -> PretrainedConfig:
    """The model's config with `override_config` applied. Raises ConfigError for a field that it does not have."""
    if model_config.external_lib:
        importlib.import_module(model_config.external_lib)
    if not (Path(model_config.path) / "config.json").is_file():
        raise ConfigError(
            f"model.path={model_config.path} is not a Hugging Face model directory: it has no config.json"
        )
    hf_config: PretrainedConfig = AutoConfig.from_pretrained(
        model_config.path, trust_remote_code=model_config.trust_remote_code
    )
    for key, value in model_config.override_config.items():
        if not hasattr(hf_config, key):
            raise ConfigError(f"model.override_config.{key}: unknown field.{did_you_mean(key, hf_config.to_dict())}")
        setattr(hf_config, key, value)
    return hf_config


@torch.no_grad()
def _load(tensors: Mapping[str, HeldTensor], checkpoint: HFCheckpoint, new: Collection[str]) -> None:
    """Fill what this rank holds of every parameter and persistent buffer, cast to the model's dtype; `new` with 0."""
    wrong = [
        f"{name}: {tensor.shape} in the model, {checkpoint.shape(name)} in the checkpoint"
        for name, tensor in tensors.items()
        if name not in new and tensor.shape != checkpoint.shape(name)
    ]
    if wrong:
        raise PlanError(f"shapes differ; {'; '.join(wrong)}")
    for name, tensor in tensors.items():
        for part in tensor.parts:
            if name in new:
                part.values().zero_()
            else:
                part.values().copy_(checkpoint.read(name, part.box))


@torch.no_grad()
def _compute_buffers(model: PreTrainedModel, device: torch.device) -> None:
    """Give the buffers that no checkpoint holds (rotary frequencies) their values, which `meta` construction lost.

    transformers recomputes them in `_init_weights`; buffers that it does not know would stay NaN and are an error.
    """
    recompute: Any = model._init_weights
    pending: dict[str, torch.Tensor] = {}
    for prefix, module in model.named_modules():
        names = [name for name in module._non_persistent_buffers_set if getattr(module, name) is not None]
        for name in names:
            setattr(module, name, torch.full_like(getattr(module, name), float("nan"), device=device))
        if names:
            recompute(module)
        pending |= {f"{prefix}.{name}": getattr(module, name) for name in names}
    if unknown := sorted(name for name, buffer in pending.items() if buffer.isnan().any()):
        raise PlanError(f"{type(model).__name__} has buffers that cannot be recomputed: {', '.join(unknown)}")
