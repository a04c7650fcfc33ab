"""What an optimizer step changes of what an FSDP rank holds. No function communicates."""

from __future__ import annotations

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from verl.workers.engine.fsdp.sharding import Sharding
from verl.workers.engine.fsdp.tensors import named_parameters


def weights(model: nn.Module, sharding: Sharding) -> dict[str, torch.Tensor]:
    """This rank's parts of what is trained, and buffers. What is frozen is in the model's directory."""
    frozen = {name for name, parameter in named_parameters(model) if not parameter.requires_grad}
    return {
        f"model.{name}.{index}": part.values()
        for name, tensor in sharding.held(model).items()
        if name not in frozen
        for index, part in enumerate(tensor.parts)
    }


def moments(optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    """Of AdamW; zeros, as its first step makes them, where that has not been taken yet."""
    found = {}
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    for index, parameter in enumerate(parameters):
        if not _local(parameter).numel():  # FSDP1: this rank has none of it
            continue
        state = optimizer.state[parameter]
        if not state:
            state["step"] = torch.zeros((), dtype=torch.float32, device=parameter.device)
            state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(parameter), torch.zeros_like(parameter)
        for kind, value in state.items():
            found[f"optimizer.{index}.{kind}"] = _local(value)
    return found


def _local(tensor: torch.Tensor) -> torch.Tensor:
    tensor = tensor.detach()
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
