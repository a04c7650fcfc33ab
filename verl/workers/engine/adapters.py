"""LoRA adapters: their layers, names, initial values and files. The only module that imports peft.

A layer that computes x W' gets (B A) scale added to its W, with A [rank, inputs] and B [outputs, rank].
"""

from __future__ import annotations

import inspect
import logging
import math
import re
import warnings
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import nn

from verl.checkpoint_engine.errors import BackendUnavailable
from verl.checkpoint_engine.support.files import sync_to_disk
from verl.utils.config import ConfigError
from verl.utils.language_model import sees
from verl.workers.config import HFModelConfig
from verl.workers.engine.tensors import HeldTensor, tied_aliases
from verl.workers.hf.conversion import listed_names
from verl.workers.hf.seeing import vision_tower

if TYPE_CHECKING:
    from transformers import PreTrainedModel

logger = logging.getLogger(__name__)

KEY = "actor_rollout_ref.model"
BASE = ".base_layer."
A, B = ".lora_A.default.weight", ".lora_B.default.weight"
"""peft's names for the adapter of `<layer>.weight`."""


def add_adapters(model: PreTrainedModel, config: HFModelConfig) -> list[str]:
    """Put an adapter beside every linear layer that `config.target_modules` names, and freeze everything else.

    `model` is on the meta device, and so are the adapters. Returns the names of the layers. Raises ConfigError for
    targets that do not exist, are not linear layers, or share their weight with another layer, and for a rank that no
    target has; BackendUnavailable without peft.
    """
    try:
        from peft import inject_adapter_in_model
        from peft.tuners.lora.layer import Linear, LoraLayer
    except ImportError as exc:
        raise BackendUnavailable(f"{KEY}.lora_rank needs the package 'peft': pip install 'verl-sync[lora]'") from exc
    key = f"{KEY}.target_modules={config.target_modules}"
    targets = _targets(model, config.target_modules)
    if not targets:
        raise ConfigError(f"{key}: {type(model).__name__} has no linear layer of that kind{_transposed(model)}")
    unknown = _left_out(model).keys() & _matching(model, targets)
    if unknown:
        raise ConfigError(f"{key}: {listed_names(sorted(unknown))}: {type(model).__name__} reads their weights itself")
    # Inside of another module, so that peft does not know the model: its rules for some would add stacked experts.
    holder = nn.ModuleDict({"of": model})
    try:
        with warnings.catch_warnings(), torch.device("meta"):
            warnings.simplefilter("ignore")  # of tied layers, which are refused below
            inject_adapter_in_model(_peft_config(config, targets), holder, low_cpu_mem_usage=True)
    except ValueError as exc:
        raise ConfigError(f"{key} does not fit {type(model).__name__}: {exc}") from exc
    tied = tied_aliases(model)
    adapted = {name: module for name, module in model.named_modules() if isinstance(module, LoraLayer)}
    wrong = [
        name
        for name, layer in adapted.items()
        if type(layer) is not Linear or not _is_linear(layer.base_layer) or f"{name}{BASE}weight" in tied
    ]
    if wrong:
        raise ConfigError(f"{key}: adapters are for linear layers with weights of their own, not {listed_names(wrong)}")
    absent = [target for target in targets if not _names_one(target, adapted)]
    if absent:
        raise ConfigError(f"{key}: {type(model).__name__} has no linear layer {', '.join(absent)}")
    if config.target_modules == "all-linear":
        _tell_without(model)
    if config.freeze_vision_tower and (seeing := sorted(adapted.keys() & _in_tower(model).keys())):
        raise ConfigError(f"{key}: freeze_vision_tower=true, and these are of the tower: {listed_names(seeing)}")
    largest = max(min(layer.weight.shape) for layer in adapted.values())
    if config.lora_rank > largest:
        raise ConfigError(f"{KEY}.lora_rank={config.lora_rank} is more than {largest}, the highest rank of its layers")
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(is_adapter(name))
    return list(adapted)


def is_adapter(name: str) -> bool:
    return name.endswith((A, B))


def has_adapters(model: nn.Module) -> bool:
    return any(is_adapter(name) for name, _ in model.named_parameters())


def base_tensors(tensors: Mapping[str, Any]) -> dict[str, Any]:
    """The tensors of the model without adapters, under their names in that model."""
    return {name.replace(BASE, "."): tensor for name, tensor in tensors.items() if not is_adapter(name)}


@torch.no_grad()
def initialize(tensors: Mapping[str, HeldTensor], seed: int) -> None:
    """Initialise as peft does: A uniform, B zero. Values do not depend on how the model is sharded.

    `tensors`: this rank's parts, in the model's order, under the names of all ranks.
    """
    generator = torch.Generator().manual_seed(seed)
    for name, tensor in tensors.items():
        if name.endswith(A):
            bound = 1 / math.sqrt(tensor.shape[1])
            whole = torch.empty(tensor.shape).uniform_(-bound, bound, generator=generator)
            for part in tensor.parts:
                part.values().copy_(whole[tuple(map(slice, part.box.start, part.box.stop))])
        elif name.endswith(B):
            for part in tensor.parts:
                part.values().zero_()


def in_peft(name: str) -> str:
    """The name of an adapter's part in a file of peft."""
    return f"base_model.model.{name.replace('.default.', '.')}"


def write_peft(directory: Path, tensors: dict[str, torch.Tensor], config: HFModelConfig, layers: Sequence[str]) -> None:
    """Write adapters as peft does, durably: `PeftModel.from_pretrained` and engines load them.

    `tensors` have the names that `in_peft` gives.
    """
    directory.mkdir(parents=True, exist_ok=True)
    save_file(tensors, directory / "adapter_model.safetensors", metadata={"format": "pt"})
    written = _peft_config(config, list(layers))
    written.inference_mode = True
    written.save_pretrained(directory)
    sync_to_disk(directory)


def _names_one(target: str, layers: Mapping[str, Any]) -> bool:
    """As peft compares them."""
    return any(name == target or name.endswith(f".{target}") for name in layers)


def _targets(model: PreTrainedModel, target_modules: str | list[str]) -> list[str]:
    """Names, or last parts of names. A text is a regular expression of whole names, as peft has it."""
    if target_modules == "all-linear":
        return _all_linear(model)
    if isinstance(target_modules, str):
        return [name for name, _ in model.named_modules() if re.fullmatch(target_modules, name)]
    return target_modules


def _all_linear(model: PreTrainedModel) -> list[str]:
    """Every linear layer but the output, those of a vision tower, and those that a model does not call or whose weight
    others have, too."""
    architecture: Any = model
    output, left_out = architecture.get_output_embeddings(), _left_out(model) | _in_tower(model)
    users = Counter(id(weight) for module in model.modules() for weight in module.parameters(recurse=False))
    return [
        name
        for name, module in model.named_modules()
        if module is not output and name not in left_out and _is_linear(module) and users[id(module.weight)] == 1
    ]


def _is_linear(module: nn.Module) -> bool:
    """Whether it computes x W' + b, of one W. Routers that are derived from linear layers choose experts."""
    if not isinstance(module, nn.Linear):
        return False
    if type(module) is nn.Linear:
        return True
    try:
        values = module(torch.empty(1, module.in_features, device=module.weight.device, dtype=module.weight.dtype))
    except (RuntimeError, TypeError, ValueError):
        return False
    return isinstance(values, torch.Tensor) and values.shape == (1, module.out_features)


def _in_tower(model: PreTrainedModel) -> dict[str, nn.Module]:
    """The modules of the vision tower of a model that sees; of others, none."""
    if not sees(model.config):
        return {}
    tower = set(vision_tower(model).modules())
    return {name: module for name, module in model.named_modules() if module in tower}


_READS = re.compile(r"self\.(\w+)\.weight\b(?!\.(?:dtype|device|shape|data))")


def _left_out(model: nn.Module) -> dict[str, nn.Module]:
    """Linear layers whose weights are read by the module around them, which then does not see an adapter.

    Those of routers are never called; those of state-space layers are not, where their kernels compute the product.
    """
    found: dict[str, nn.Module] = {}
    sources: dict[str, str] = {}
    for prefix, parent in model.named_modules():
        kind = f"{type(parent).__module__}.{type(parent).__qualname__}"
        if kind not in sources:
            sources[kind] = _source(type(parent))
        computes_states = isinstance(getattr(parent, "conv1d", None), nn.Conv1d)
        for name in set(_READS.findall(sources[kind])):
            child = getattr(parent, name, None)
            if isinstance(child, nn.Linear) and (computes_states or f"self.{name}(" not in sources[kind]):
                found[f"{prefix}.{name}" if prefix else name] = child
    return found


def _source(of: type[nn.Module]) -> str:
    try:
        return inspect.getsource(of)
    except (OSError, TypeError):  # it was not read from a file
        return ""


def _matching(model: nn.Module, targets: list[str]) -> set[str]:
    return {name for name, _ in model.named_modules() for target in targets if _names_one(target, {name: None})}


def _transposed(model: nn.Module) -> str:
    kinds = {type(module).__name__ for module in model.modules() if type(module).__name__ == "Conv1D"}
    return ": its layers are transposed ones (Conv1D), which have no adapters here" if kinds else ""


def _tell_without(model: PreTrainedModel) -> None:
    """Name the matrices that are neither adapted nor embeddings: stacked experts, routers, convolutions."""
    seen_by = _in_tower(model)
    known = {f"{name}.weight" for name, module in model.named_modules() if isinstance(module, nn.Embedding)} | {
        f"{name}.weight" for name in _output_names(model)
    }
    without = [
        name
        for name, parameter in model.named_parameters()
        if sum(size > 1 for size in parameter.shape) > 1
        and name not in known
        and not is_adapter(name)
        and BASE not in name
        and name.rpartition(".")[0] not in seen_by
    ]
    families = list(dict.fromkeys(re.sub(r"(?<=\.)\d+(?=\.)", "*", name) for name in without))
    if families and not (dist.is_initialized() and dist.get_rank()):
        logger.info(
            "%s.target_modules=all-linear: no adapters beside %s, which are no linear layers with weights of their own "
            "that the model calls",
            KEY,
            listed_names(families),
        )


def _output_names(model: nn.Module) -> list[str]:
    architecture: Any = model
    output = architecture.get_output_embeddings()
    return [name for name, module in model.named_modules() if module is output]


def _peft_config(config: HFModelConfig, targets: str | list[str]) -> Any:
    from peft import LoraConfig

    return LoraConfig(
        r=config.lora_rank,
        lora_alpha=config.lora_alpha,
        target_modules=targets,
        base_model_name_or_path=config.path,
        task_type="CAUSAL_LM",
    )
