"""Which tensors of a sharded model make up its checkpoint, and which part of each this rank holds. No collectives."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from verl.checkpoint_engine.errors import PlanError
from verl.checkpoint_engine.types import Box


def reshard(model: nn.Module) -> None:
    """Free gathered parameters, so that `named_parameters` yields the sharded ones.

    A forward pass without a backward pass leaves groups gathered (always the root's, if its parameters were not to be
    freed after forward), and the model then lists plain tensors in their place.
    """
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def checkpoint_tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    """Parameters and persistent buffers by name, in the model's order; tied ones once, under their first name.

    These are what a Hugging Face checkpoint holds. Buffers that are computed from the config (rotary `inv_freq`) are
    not persistent and belong to neither.
    """
    tensors: dict[str, torch.Tensor] = dict(model.named_parameters())
    for prefix, module in model.named_modules():
        for name, buffer in module.named_buffers(recurse=False):
            if name not in module._non_persistent_buffers_set:
                tensors[f"{prefix}.{name}" if prefix else name] = buffer
    return tensors


def local_part(tensor: torch.Tensor) -> tuple[Box, torch.Tensor]:
    """The box of `tensor` that this rank holds (possibly empty) and its values, borrowed."""
    if not isinstance(tensor, DTensor):
        return Box.whole(tuple(tensor.shape)), tensor.detach()
    if any(type(placement) not in (Shard, Replicate) for placement in tensor.placements):
        raise PlanError(
            f"a tensor of shape {tuple(tensor.shape)} with placements {tensor.placements} is no box per rank"
        )
    shape, offset = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    box = Box(tuple(offset), tuple(start + size for start, size in zip(offset, shape, strict=True)))
    with torch.no_grad():
        return box, tensor.to_local()


def check_names(model_names: Iterable[str], checkpoint_names: Iterable[str], aliases: Iterable[str], what: str) -> None:
    """Compare what the model has with what its checkpoint has; `aliases` (tied names) may be in the checkpoint or not.

    Raises PlanError that lists every missing and every unexpected name.
    """
    have, listed = set(model_names), set(checkpoint_names)
    missing = sorted(have - listed)
    unexpected = sorted(name for name in listed - have - set(aliases) if not name.endswith(".rotary_emb.inv_freq"))
    if missing or unexpected:
        raise PlanError(
            f"the tensors of {what} and of its checkpoint differ; in the model only: {', '.join(missing) or 'none'}; "
            f"in the checkpoint only: {', '.join(unexpected) or 'none'}"
        )


def tied_aliases(model: nn.Module) -> frozenset[str]:
    """Names under which a parameter appears again: `lm_head.weight` of a model with tied embeddings."""
    first = dict(model.named_parameters())
    return frozenset(name for name, _ in model.named_parameters(remove_duplicate=False) if name not in first)
