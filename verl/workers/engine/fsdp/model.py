"""Build a Hugging Face model: shard it before any weight exists, then fill each rank with its part."""

from __future__ import annotations

import copy
import importlib
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    AutoModelForTokenClassification,
    PretrainedConfig,
    PreTrainedModel,
)

from verl.utils.config import ConfigError
from verl.utils.language_model import auto_class, choose_part, is_wrapper, language_config, sees
from verl.utils.model import ATTENTION, EXACT, override, read_hf_config
from verl.utils.pictures import PictureProcessor, load_processor
from verl.utils.trainable import require_trainable
from verl.workers.config import FSDPConfig, HFModelConfig
from verl.workers.engine.adapters import add_adapters, base_tensors, initialize, is_adapter
from verl.workers.engine.filling import fill, require_equal
from verl.workers.engine.fsdp.lora import Adapters
from verl.workers.engine.fsdp.mesh import DTYPES
from verl.workers.engine.fsdp.sharding import Sharding
from verl.workers.engine.tensors import as_in_checkpoint
from verl.workers.hf import exact
from verl.workers.hf.attention import attention_implementation
from verl.workers.hf.building import parameters_on_meta, require_buffers
from verl.workers.hf.checkpoint import HFCheckpoint
from verl.workers.hf.conversion import Conversion
from verl.workers.hf.dropout import drop_nothing, random_fields_of, set_fields, silence
from verl.workers.hf.packing import attend_sequences_apart, places_by_rows
from verl.workers.hf.precision import (
    names_kept_by_transformers,
    names_kept_wide,
    require_precision,
)
from verl.workers.hf.probing import Finding, Way, find_way
from verl.workers.hf.seeing import vision_tower
from verl.workers.hf.splitting import attend_by_heads
from verl.workers.hf.values import register_value_head
from verl.workers.hf.wrapped import conversion_between

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Head:
    """The head of a model, on its last hidden states."""

    auto: Any
    """The class of transformers that builds such a model."""
    config_fields: Mapping[str, Any] = field(default_factory=dict)
    new: frozenset[str] = frozenset()
    """Tensors that the checkpoint may lack: they start at zero."""
    unused: frozenset[str] = frozenset()
    """Tensors that the checkpoint may have although the model does not."""
    prepare: Callable[[PretrainedConfig], None] = lambda config: None
    """Called with a configuration before `auto` is."""


CAUSAL_LM = Head(auto=AutoModelForCausalLM)
TOKEN_VALUES = Head(
    auto=AutoModelForTokenClassification,
    config_fields={"num_labels": 1, "classifier_dropout": 0.0},
    new=frozenset({"score.weight", "score.bias"}),
    unused=frozenset({"lm_head.weight", "lm_head.bias", "embed_out.weight", "output_projection.weight"}),
    prepare=register_value_head,
)
"""The head of a critic: one number per token. It loads from a policy's directory or a critic's export."""


@dataclass(frozen=True, kw_only=True)
class BuiltModel:
    """A model of which this rank holds a part, with the weights of its directory."""

    module: nn.Module
    """What to call."""
    adapters: Adapters | None
    conversion: Conversion
    """The conversion between the model and its checkpoint."""
    kept_wide: frozenset[str]
    """Tensors of the checkpoint that engines get in the dtype in which they are trained."""
    new: frozenset[str]
    """Tensors that the checkpoint lacks."""
    exported_aside: tuple[str, ...]
    """Tensors of the checkpoint that are no part of the model, and go into exports as they are."""
    own_config: PretrainedConfig | None
    """The configuration of a model that differs from the checkpoint's: a policy with a critic's head."""
    together: Finding
    """How its sequences may share a call."""
    processor: PictureProcessor | None = None
    """The processor of a model with vision."""


def build_model(
    model_config: HFModelConfig,
    fsdp_config: FSDPConfig,
    device: torch.device,
    sharding: Sharding,
    *,
    trainable: bool,
    head: Head = CAUSAL_LM,
    seed: int = 1,
) -> BuiltModel:
    """The model on `device`, sharded over the default process group, with the weights of its directory. A collective.

    One that is trained with LoRA has new adapters, the same for every number of ranks.

    Raises ConfigError for a directory or configuration that cannot be used, PlanError when the tensors of the model and
    of its checkpoint differ, and when the model that was built is not what the checkpoint says.
    """
    whole_config = load_hf_config(model_config)
    head = _whole(head, whole_config)
    hf_config = _under(head, whole_config, model_config)
    dtype = DTYPES[fsdp_config.model_dtype]
    with HFCheckpoint(Path(model_config.path)) as checkpoint:
        with parameters_on_meta():
            model = _make(head, hf_config, model_config, dtype)
        if not trainable:  # what the class itself freezes stays as it is
            model.requires_grad_(False)
        elif model_config.freeze_vision_tower and sees(whole_config):
            vision_tower(model).requires_grad_(False)
        conversion = conversion_between(model, whole_config, checkpoint.shapes, may_lack=head.new)
        nowhere = (*conversion.unexpected, *conversion.aside)
        require_trainable(whole_config, f"model.path={model_config.path}", beside_model=nowhere)
        conversion.require_whole()
        require_precision(conversion.shapes, checkpoint, dtype)
        _tell_aside(conversion, head)
        wide = names_kept_wide(conversion.shapes, checkpoint)
        wide |= names_kept_by_transformers(model, conversion)
        shared = fsdp_config.ulysses_sequence_parallel_size > 1
        if shared:
            attend_by_heads(model, fsdp_config.ulysses_sequence_parallel_size)
        together = _agreed(way_through(model_config, fsdp_config, head), model_config, shared=shared)
        if together.way is Way.PACKED and not shared:
            attend_sequences_apart(model)
        adapted = trainable and model_config.lora_rank > 0
        if adapted:
            add_adapters(model, model_config)
        if trainable and model_config.enable_gradient_checkpointing:
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        sharded = sharding.shard(model, fsdp_config, device)
        held = sharding.held(sharded)
        tensors = as_in_checkpoint(base_tensors(held), conversion)
        filled = fill(tensors, checkpoint, zero=head.new - conversion.pieces.keys())
        for other, name in conversion.copies.items():
            require_equal(name, other, tensors[name], checkpoint)
    adapters = None
    if adapted:
        adapters = Adapters(sharded, model_config)
        initialize(held, seed)
        adapters.gather()
    if model_config.check_load:
        filled.require(type(model).__name__)
        with torch.device("meta"):
            reference = _make(head, hf_config, model_config, dtype)
        require_buffers(sharded, reference, conversion.pieces)
    return BuiltModel(
        module=sharded,
        adapters=adapters,
        conversion=conversion,
        kept_wide=wide,
        new=head.new - conversion.pieces.keys(),
        exported_aside=tuple(name for name in conversion.aside if name not in head.unused),
        together=together,
        own_config=_exported(model.config, model_config) if head.config_fields else None,
        processor=load_processor(model_config.path, whole_config),
    )


def way_through(model_config: HFModelConfig, fsdp_config: FSDPConfig, head: Head = CAUSAL_LM) -> Finding:
    """How sequences may share a call of the model in a local directory, by a probe of a small one."""
    whole = load_hf_config(model_config)
    head = _whole(head, whole)
    hf_config = _under(head, whole, model_config)

    def build(config: PretrainedConfig, implementation: str | None) -> PreTrainedModel:
        model: PreTrainedModel = head.auto.from_config(
            copy.deepcopy(config),
            dtype=torch.float32,
            trust_remote_code=model_config.trust_remote_code,
            **({"attn_implementation": implementation} if implementation else {}),
        )
        return model

    shared = fsdp_config.ulysses_sequence_parallel_size > 1
    if shared and sees(hf_config):
        raise ConfigError(f"model.path={model_config.path}: ranks do not share rows of {hf_config.model_type}")
    by_rows = places_by_rows(hf_config)
    found = find_way(
        hf_config,
        build,
        attention_implementation(hf_config, model_config.override_config.get(ATTENTION)),
        furthest=Way.PACKED if (shared or model_config.use_remove_padding) and not by_rows else Way.ROWS,
        shared=shared,
        lasts=model_config.is_of_transformers,
    )
    if found.way is Way.ROWS and by_rows and model_config.use_remove_padding:
        return replace(found, why="what pictures become is placed by rows")
    return found


def require_way(together: Finding, model_config: HFModelConfig) -> None:
    """Raises ConfigError for a model that computes nothing, or something else however its sequences are given, and
    where they must share a row and cannot."""
    if together.way is Way.NONE:
        raise ConfigError(f"model.path={model_config.path}: {together.why}")
    if together.way is not Way.PACKED:
        require_packing_is_not_asked(model_config, together.why)


def _agreed(together: Finding, model_config: HFModelConfig, *, shared: bool) -> Finding:
    """The same on every rank, see `require_way`. Says what it is, where more was asked for. A collective."""
    way = torch.tensor(int(together.way))
    dist.all_reduce(way, op=dist.ReduceOp.MIN)
    together = replace(together, way=Way(int(way)))
    require_way(together, model_config)
    if together.why and not shared and dist.get_rank() == 0:
        how = "one sequence at a time" if together.way is Way.ALONE else "each sequence in a row of its own"
        logger.warning("%s is computed with %s: %s", model_config.path, how, together.why)
    return together


def require_packing_is_not_asked(model_config: HFModelConfig, why: str) -> None:
    """Raises ConfigError if sequences must share a row, which the model cannot compute for the reason `why`."""
    if model_config.require_remove_padding:
        raise ConfigError(
            f"model.require_remove_padding=true, and {model_config.path} cannot be computed without padding: {why}; "
            "with false sequences have rows of their own where they need them"
        )


def _make(head: Head, hf_config: PretrainedConfig, model_config: HFModelConfig, dtype: torch.dtype) -> PreTrainedModel:
    """On whatever device the caller has made the default one. Raises ConfigError for an attention that does not fit."""
    attention = attention_implementation(hf_config, model_config.override_config.get(ATTENTION))
    hf_config = copy.deepcopy(hf_config)
    if not model_config.drops:
        drop_nothing(hf_config)
    try:
        model: PreTrainedModel = head.auto.from_config(
            hf_config,
            dtype=dtype,
            trust_remote_code=model_config.trust_remote_code,
            **({"attn_implementation": attention} if attention else {}),
        )
    except (ImportError, ValueError) as exc:
        why = str(exc).strip().splitlines()[0]  # names of all classes may follow
        raise ConfigError(f"model.path={model_config.path}: transformers cannot build the model: {why}") from exc
    if not model_config.drops:
        silence(model)
    if attention == EXACT:
        exact.agree(model)
    return model


def make_model(head: Head, model_config: HFModelConfig, dtype: torch.dtype) -> PreTrainedModel:
    """Make the model with random weights on torch's default device. Raises ConfigError."""
    whole = load_hf_config(model_config)
    head = _whole(head, whole)
    return _make(head, _under(head, whole, model_config), model_config, dtype)


def _whole(head: Head, config: PretrainedConfig) -> Head:
    """Of a model that sees, transformers has another class, with the same head."""
    return replace(head, auto=auto_class(config)) if sees(config) and head is CAUSAL_LM else head


def _under(head: Head, whole: PretrainedConfig, model_config: HFModelConfig) -> PretrainedConfig:
    """Of the language model with `head` in a model of `whole`, which is changed unless that is a wrapper's."""
    if head.config_fields and is_wrapper(whole):
        raise ConfigError(
            f"model.path={model_config.path}: {whole.model_type} has a language model inside of a larger one, and a "
            "critic is only made of a language model's own directory: give one, or an estimator without a critic"
        )
    hf_config = language_config(whole)
    for name, value in head.config_fields.items():
        setattr(hf_config, name, value)
    head.prepare(hf_config)
    return hf_config


def _exported(config: PretrainedConfig, model_config: HFModelConfig) -> PretrainedConfig:
    """With the dropout of the directory that it came from."""
    config = copy.deepcopy(config)
    set_fields(config, list(random_fields_of(load_hf_config(model_config))))
    return config


def _tell_aside(conversion: Conversion, head: Head) -> None:
    aside = [name for name in conversion.aside if name not in head.unused and not name.endswith("inv_freq")]
    if aside and dist.get_rank() == 0:
        logger.warning(
            "%d tensors of the checkpoint are no part of %s (%s%s): they are not trained and not sent to engines; "
            "exports have them unchanged",
            len(aside),
            conversion.model,
            ", ".join(aside[:3]),
            ", ..." if len(aside) > 3 else "",
        )


def adapter_shapes(model_config: HFModelConfig) -> dict[str, tuple[int, ...]]:
    """Shapes of the adapters of `build_model`, in the model's order. Needs no process group and no memory for weights.

    Raises the errors of `build_model` about LoRA.
    """
    hf_config = language_config(load_hf_config(model_config))
    with torch.device("meta"):
        model = auto_class(hf_config).from_config(hf_config, trust_remote_code=model_config.trust_remote_code)
    add_adapters(model, model_config)
    return {name: tuple(parameter.shape) for name, parameter in model.named_parameters() if is_adapter(name)}


def load_hf_config(model_config: HFModelConfig) -> PretrainedConfig:
    """The model's config with `override_config` applied. Raises ConfigError for a field that it does not have."""
    if model_config.external_lib:
        importlib.import_module(model_config.external_lib)
    if not (Path(model_config.path) / "config.json").is_file():
        raise ConfigError(
            f"model.path={model_config.path} is not a Hugging Face model directory: it has no config.json"
        )
    hf_config = read_hf_config(model_config.path, trust_remote_code=model_config.trust_remote_code)
    override(hf_config, model_config.override_config, "model.override_config")
    choose_part(hf_config, model_config.language_model_only, "model.language_model_only")
    require_trainable(hf_config, f"model.path={model_config.path}")
    return hf_config
