"""The state of an FSDP rank that an optimizer step changes. No function communicates."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from verl.checkpoint_engine.plan.types import Box
from verl.workers.engine.fsdp.sharding import Sharding
from verl.workers.engine.snapshots import Place
from verl.workers.engine.tensors import HeldTensor, Part, named_parameters


def weights(model: nn.Module, sharding: Sharding) -> dict[str, torch.Tensor]:
    """This rank's parts of trained parameters, and buffers. Frozen ones are in the model's directory."""
    return {
        f"model.{name}.{index}": part.values()
        for name, tensor in _changing(model, sharding)
        for index, part in enumerate(tensor.parts)
    }


def moments(optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    """The moments of AdamW; before its first step zeros, as that step would make them."""
    return {
        f"optimizer.{index}.{kind}": _local(value)
        for index, parameter in _stepped(optimizer)
        for kind, value in optimizer.state[parameter].items()
        if _local(value).numel()
    }


def places_of_weights(model: nn.Module, sharding: Sharding) -> dict[str, list[Place]]:
    """The places of `weights` in whole tensors."""
    return {
        f"model.{name}.{index}": [Place(f"model.{name}", part.box, Box.whole(part.box.shape))]
        for name, tensor in _changing(model, sharding)
        for index, part in enumerate(tensor.parts)
    }


def places_of_moments(optimizer: torch.optim.Optimizer, model: nn.Module, sharding: Sharding) -> dict[str, list[Place]]:
    """The places of `moments`, which are divided as the weights. The number of steps is the same on all ranks."""
    names = {id(parameter): name for name, parameter in named_parameters(model)}
    held, found = sharding.held(model), {}
    for index, parameter in _stepped(optimizer):
        name = names[id(parameter)]
        for kind, value in optimizer.state[parameter].items():
            if kind != "step" and _local(value).numel():
                within = _within(_local(value), held[name].parts)
                found[f"optimizer.{index}.{kind}"] = [
                    Place(f"optimizer.{kind}.{name}", part.box, inner)
                    for part, inner in zip(held[name].parts, within, strict=True)
                ]
    return found


def _changing(model: nn.Module, sharding: Sharding) -> Iterator[tuple[str, HeldTensor]]:
    frozen = {name for name, parameter in named_parameters(model) if not parameter.requires_grad}
    return ((name, tensor) for name, tensor in sharding.held(model).items() if name not in frozen)


def _stepped(optimizer: torch.optim.Optimizer) -> Iterator[tuple[int, nn.Parameter]]:
    """Those that AdamW steps on this rank, by their number among all.

    FSDP2's have a number of steps where the rank has no element of them, too: a checkpoint takes it from any rank.
    """
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    for index, parameter in enumerate(parameters):
        if not parameter.numel():  # FSDP1, which gives a parameter without elements no gradient
            continue
        state = optimizer.state[parameter]
        if not state:
            state["step"] = torch.zeros((), dtype=torch.float32, device=parameter.device)
            state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(parameter), torch.zeros_like(parameter)
        yield index, parameter


def _within(local: torch.Tensor, parts: Sequence[Part]) -> list[Box]:
    """Where a parameter's parts are in a moment: it has their shape, or with FSDP1 they lie in a row."""
    if [part.box.shape for part in parts] == [tuple(local.shape)]:
        return [Box.whole(tuple(local.shape))]
    found, offset = [], 0
    for part in parts:
        found.append(Box((offset,), (offset + part.box.numel,)))
        offset += part.box.numel
    return found


def _local(tensor: torch.Tensor) -> torch.Tensor:
    tensor = tensor.detach()
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
