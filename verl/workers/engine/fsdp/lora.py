"""LoRA on FSDP2: small trainable matrices beside frozen linear layers.

FSDP2 shards A and B by rows like every parameter, so a rank has the rows of B that belong to its rows of W, but not all
of A. After each optimizer step the training threads gather A: per layer, rank / outputs of the bytes that a forward
pass gathers. A sync then merges any box of W without another rank. If engines load adapters, ranks neither merge nor
gather: a sync moves each rank's parts of A and B.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from verl.checkpoint_engine.errors import PlanError
from verl.checkpoint_engine.plan.types import Box
from verl.utils.disk import full_disk_told
from verl.utils.first_rank import FirstRank
from verl.workers.config import HFModelConfig
from verl.workers.engine.adapters import BASE, A, B, base_tensors, in_peft, write_peft
from verl.workers.engine.tensors import HeldTensor, Part, named_parameters


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
    def gather(self) -> None:
        """Gather the present A of every layer on every rank, if syncs merge. A collective; called after A changes."""
        if self._config.lora.merge:
            self._whole_a = {layer: _whole(a) for layer, (a, _) in self._pairs.items()}

    def sent(self, tensors: Mapping[str, HeldTensor]) -> dict[str, HeldTensor]:
        """The part of `tensors`, this rank's, that rollout engines get.

        It is the model without adapters, whose values are read with the adapters merged; or the adapters alone, under
        peft's names.
        """
        if not self._config.lora.merge:
            return {in_peft(layer + part): tensors[layer + part] for layer in self._pairs for part in (A, B)}
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
                tensors[in_peft(layer + part)] = _whole(factor).cpu().contiguous()
        with full_disk_told(directory, sum(tensor.nbytes for tensor in tensors.values())), FirstRank() as first:
            first.do(lambda: write_peft(directory, tensors, self._config, list(self._pairs)))


def _whole(parameter: torch.Tensor) -> torch.Tensor:
    parameter = parameter.detach()
    return parameter.full_tensor() if isinstance(parameter, DTensor) else parameter
