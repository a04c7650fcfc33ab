"""LoRA on FSDP2: small trainable matrices beside frozen linear layers. The only file that knows peft.

A layer that computes x W' gets (B A) scale added to its W, with A [rank, inputs] and B [outputs, rank]. FSDP2 shards A
and B by rows like every parameter, so a rank has those rows of B that belong to its rows of W, but not all of A. After
each optimizer step the ranks gather A, on the thread that trains: of a layer, rank / outputs of what every forward pass
gathers. A sync then merges any box of W without asking another rank. Where engines load adapters, nothing is merged or
gathered: a sync moves what each rank holds of A and B.
"""

from __future__ import annotations

import functools
import math
import warnings
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import save_file
from torch import nn
from torch.distributed.tensor import DTensor

from verl.checkpoint_engine.errors import BackendUnavailable, PlanError
from verl.checkpoint_engine.plan.types import Box
from verl.utils.config import ConfigError
from verl.utils.disk import full_disk_told
from verl.utils.files import sync_to_disk
from verl.utils.first_rank import FirstRank
from verl.workers.config import HFModelConfig
from verl.workers.engine.fsdp.tensors import HeldTensor, Part, named_parameters, tied_aliases

if TYPE_CHECKING:
    from transformers import PreTrainedModel

KEY = "actor_rollout_ref.model"
BASE = ".base_layer."
A, B = ".lora_A.default.weight", ".lora_B.default.weight"
"""How peft names the parts of what was `<layer>.weight`."""


def add_adapters(model: PreTrainedModel, config: HFModelConfig) -> None:
    """Put an adapter beside every linear layer that `config.target_modules` names, and freeze everything else.

    `model` is on the meta device, and so are the adapters. Raises ConfigError for targets that do not exist, are not
    linear layers, or share their weight with another layer, and for a rank that no target has; BackendUnavailable
    without peft.
    """
    try:
        from peft import inject_adapter_in_model
        from peft.tuners.lora.layer import Linear, LoraLayer
    except ImportError as exc:
        raise BackendUnavailable(f"{KEY}.lora_rank needs the package 'peft': pip install 'verl-sync[lora]'") from exc
    key = f"{KEY}.target_modules={config.target_modules}"
    targets = _all_linear(model) if config.target_modules == "all-linear" else config.target_modules
    try:
        with warnings.catch_warnings(), torch.device("meta"):
            warnings.simplefilter("ignore")  # of tied layers and stacked experts, which are refused below
            inject_adapter_in_model(_peft_config(config, targets), model, low_cpu_mem_usage=True)
    except ValueError as exc:
        raise ConfigError(f"{key} does not fit {type(model).__name__}: {exc}") from exc
    tied = tied_aliases(model)
    adapted = {name: module for name, module in model.named_modules() if isinstance(module, LoraLayer)}
    wrong = [name for name, layer in adapted.items() if type(layer) is not Linear or f"{name}{BASE}weight" in tied]
    if wrong:
        raise ConfigError(f"{key}: adapters are for linear layers with weights of their own, not {', '.join(wrong)}")
    largest = max(min(layer.weight.shape) for layer in adapted.values())
    if config.lora_rank > largest:
        raise ConfigError(f"{KEY}.lora_rank={config.lora_rank} is more than {largest}, the highest rank of its layers")
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(is_adapter(name))


def is_adapter(name: str) -> bool:
    return name.endswith((A, B))


class Adapters:
    """The adapters of a sharded model."""

    def __init__(self, model: nn.Module, config: HFModelConfig) -> None:
        self._config = config
        self._scale = config.lora_alpha / config.lora_rank
        parameters = dict(named_parameters(model))
        self._pairs = {
            name.removesuffix(A): (parameter, parameters[name.removesuffix(A) + B])
            for name, parameter in parameters.items()
            if name.endswith(A)
        }
        self._whole_a: dict[str, torch.Tensor] = {}

    @torch.no_grad()
    def initialize(self, tensors: Mapping[str, HeldTensor], seed: int) -> None:
        """As peft does: A uniform, B zero. The same for any number of ranks. `tensors` is what this rank holds."""
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

    @torch.no_grad()
    def gather(self) -> None:
        """Give every rank the present A of every layer, if syncs merge. A collective; to follow what changes A."""
        if self._config.lora.merge:
            self._whole_a = {layer: _whole(a) for layer, (a, _) in self._pairs.items()}

    def sent(self, tensors: Mapping[str, HeldTensor]) -> dict[str, HeldTensor]:
        """What rollout engines get of `tensors`, which is what this rank holds.

        Those of the model without adapters, with the adapters added to what is read; or the adapters alone, as peft
        names them.
        """
        if not self._config.lora.merge:
            return {_in_peft(layer, part): tensors[layer + part] for layer in self._pairs for part in (A, B)}
        found = {}
        for name, tensor in base_tensors(tensors).items():
            layer = name.removesuffix(".weight")
            if name.endswith(".weight") and layer in self._pairs:
                tensor = self._merged(layer, tensor, tensors[layer + B])
            found[name] = tensor
        return found

    def _merged(self, layer: str, base: HeldTensor, b: HeldTensor) -> HeldTensor:
        rows = [(part.box.start[0], part.box.stop[0]) for part in base.parts]
        if [(part.box.start[0], part.box.stop[0]) for part in b.parts] != rows:
            raise PlanError(f"this rank holds other rows of {layer} than of its adapter")
        parts = (
            replace(part, delta=functools.partial(self._delta, layer, b_part))
            for part, b_part in zip(base.parts, b.parts, strict=True)
        )
        return replace(base, parts=tuple(parts))

    @torch.no_grad()
    def _delta(self, layer: str, b: Part, box: Box) -> torch.Tensor:
        """float32, of the shape of `box`, which lies in the rows of `b`."""
        (row, column), (last_row, last_column) = box.start, box.stop
        first = b.box.start[0]
        rows = b.values()[row - first : last_row - first].float()
        return (rows @ self._whole_a[layer][:, column:last_column].float()).mul_(self._scale)

    @torch.no_grad()
    def merge(self, name: str, base: torch.Tensor) -> torch.Tensor:
        """`base`, the whole of the tensor `name`, with its adapter added. A collective if it has one."""
        layer = name.removesuffix(f"{BASE}weight")
        if layer not in self._pairs:
            return base
        a, b = (_whole(factor).float() for factor in self._pairs[layer])
        return base.float() + (b @ a).mul_(self._scale)

    def save_peft(self, directory: Path) -> None:
        """Write the adapters as peft does, durably; `PeftModel.from_pretrained` and engines load them. A collective."""
        tensors = {}
        for layer, factors in self._pairs.items():
            for part, factor in zip((A, B), factors, strict=True):
                tensors[_in_peft(layer, part)] = _whole(factor).cpu().contiguous()
        with full_disk_told(directory, sum(tensor.nbytes for tensor in tensors.values())), FirstRank() as first:
            first.do(lambda: self._write_peft(directory, tensors))

    def _write_peft(self, directory: Path, tensors: dict[str, torch.Tensor]) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        save_file(tensors, directory / "adapter_model.safetensors", metadata={"format": "pt"})
        config = _peft_config(self._config, list(self._pairs))
        config.inference_mode = True
        config.save_pretrained(directory)
        sync_to_disk(directory)


def base_tensors(tensors: Mapping[str, Any]) -> dict[str, Any]:
    """Those of the model without adapters, under the names that they have there."""
    return {name.replace(BASE, "."): tensor for name, tensor in tensors.items() if not is_adapter(name)}


def _in_peft(layer: str, part: str) -> str:
    """The name of an adapter's `part`, A or B, in a file of peft's."""
    return f"base_model.model.{layer}{part.replace('.default.', '.')}"


def _all_linear(model: PreTrainedModel) -> list[str]:
    """Every linear layer but the output; peft's own `all-linear` also takes routers and stacked experts."""
    architecture: Any = model
    output = architecture.get_output_embeddings()
    return [name for name, module in model.named_modules() if type(module) is nn.Linear and module is not output]


def _peft_config(config: HFModelConfig, targets: str | list[str]) -> Any:
    from peft import LoraConfig

    return LoraConfig(
        r=config.lora_rank,
        lora_alpha=config.lora_alpha,
        target_modules=targets,
        base_model_name_or_path=config.path,
        task_type="CAUSAL_LM",
    )


def _whole(parameter: torch.Tensor) -> torch.Tensor:
    parameter = parameter.detach()
    return parameter.full_tensor() if isinstance(parameter, DTensor) else parameter
