"""torch FSDP2: every parameter is a DTensor of which a rank holds some rows."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from verl.checkpoint_engine.compat.fsdp import local_boxes
from verl.checkpoint_engine.compat.torch import replace_tensors
from verl.checkpoint_engine.plan.types import Box
from verl.workers.config import FSDPConfig
from verl.workers.engine.fsdp.engine import FSDPEngine
from verl.workers.engine.fsdp.mesh import DTYPES, build_mesh, offloads
from verl.workers.engine.fsdp.sharding import layers_apart
from verl.workers.engine.tensors import HeldTensor, Part, named_parameters, persistent_buffers


class FSDP2Sharding:
    """Implements `Sharding`. Ranks that replicate each other hold the same boxes."""

    def shard(self, model: PreTrainedModel, config: FSDPConfig, device: torch.device) -> nn.Module:
        """One FSDP group for each of `layers_apart`, one for the rest: tied embeddings must be gathered together."""
        options: dict[str, Any] = {
            "mesh": build_mesh(device.type, config.fsdp_size),
            "reshard_after_forward": config.reshard_after_forward,
            "mp_policy": MixedPrecisionPolicy(param_dtype=DTYPES[config.dtype], reduce_dtype=torch.float32),
            "offload_policy": CPUOffloadPolicy() if offloads(config, device) else OffloadPolicy(),
        }
        sharded: list[FSDPModule] = [fully_shard(layer, **options) for layer in layers_apart(model)]
        fully_shard(model, **options)
        if config.forward_prefetch:
            for layer, following in pairwise(sharded):
                layer.set_modules_to_forward_prefetch([following])
        home = torch.device("cpu") if offloads(config, device) else device
        # Buffers have their values already.
        replace_tensors(model, lambda tensor: torch.empty_like(tensor, device=home) if tensor.is_meta else tensor)
        return model

    def held(self, model: nn.Module) -> dict[str, HeldTensor]:
        self.reshard(model)  # a gathered model lists plain tensors in the place of its parameters
        tensors = {name: _held(parameter) for name, parameter in named_parameters(model)}
        return tensors | {name: HeldTensor.whole(b, is_parameter=False) for name, b in persistent_buffers(model)}

    def reshard(self, model: nn.Module) -> None:
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.reshard()

    def clip_grad_norm(self, model: nn.Module, max_norm: float) -> float:
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm)
        return float(norm.full_tensor() if isinstance(norm, DTensor) else norm)


class FSDP2Engine(FSDPEngine):
    """`strategy=fsdp2`."""

    sharding = FSDP2Sharding()


def _held(parameter: nn.Parameter) -> HeldTensor:
    if not isinstance(parameter, DTensor):
        return HeldTensor.whole(parameter, is_parameter=True)
    boxes = ((Box(start, stop), inside) for start, stop, inside in local_boxes(parameter))
    parts = tuple(
        Part(box=box, values=lambda inside=inside: parameter.to_local().detach()[inside])  # type: ignore[misc]
        for box, inside in boxes
        if box.numel
    )
    return HeldTensor(shape=tuple(parameter.shape), dtype=parameter.dtype, is_parameter=True, parts=parts)
