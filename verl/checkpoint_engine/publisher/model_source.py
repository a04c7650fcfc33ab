"""What this process holds of a torch module, or of named tensors: a `WeightSource`. No method communicates."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor import Shard as Sharded

from ..compat.fsdp import local_box
from ..compat.torch import is_persistent
from ..errors import ConfigError, PlanError
from ..memory.publishing import copy_values
from ..plan.types import Box, Shard, TensorSpec

WRAPPERS = ("_orig_mod.", "_checkpoint_wrapped_module.", "module.")
"""What `torch.compile`, activation checkpointing and DDP put into names: the last one at their beginning only."""


class ModelSource:
    """Reads the values as they are when they are asked for; a mapping may have other tensors under its names by then.

    A DTensor (FSDP2, tensor parallelism) is the box that this rank holds; any other tensor is on every rank whole.
    """

    def __init__(self, model: nn.Module | Mapping[str, torch.Tensor], dtype: str | None = None) -> None:
        """`dtype`: what floating-point tensors are sent in, `bfloat16` for instance; None: as they are held.

        Raises ConfigError for what has no tensors, for FSDP1, and for a `dtype` that torch does not know.
        """
        self._tensors = _named_tensors(model) if isinstance(model, nn.Module) else model
        if not self._tensors:
            raise ConfigError("there is nothing to publish: the model has no tensors")
        sent = getattr(torch, dtype, None) if dtype is not None else None
        if dtype is not None and not (isinstance(sent, torch.dtype) and sent.is_floating_point):
            raise ConfigError(f"dtype={dtype!r} is no floating-point type of torch, such as bfloat16")
        self._specs = [
            TensorSpec(
                name=name,
                shape=tuple(tensor.shape),
                dtype=str(sent if sent is not None and tensor.is_floating_point() else tensor.dtype)[len("torch.") :],
            )
            for name, tensor in self._tensors.items()
        ]
        self._by_name = {spec.name: spec for spec in self._specs}

    def specs(self) -> Sequence[TensorSpec]:
        return self._specs

    def shards(self) -> Sequence[Shard]:
        boxes = {spec.name: self._box(spec) for spec in self._specs}
        return [Shard(name, box) for name, box in boxes.items() if box.numel]

    @property
    def device(self) -> torch.device | None:
        devices = {_local(tensor).device for tensor in self._tensors.values()}
        return devices.pop() if len(devices) == 1 else None

    def view(self, shard: Shard) -> torch.Tensor | None:
        values = self._values(shard)
        lies_as_sent = values.device.type == "cpu" and values.dtype == getattr(torch, self._by_name[shard.name].dtype)
        return values if lies_as_sent and values.is_contiguous() else None

    def copy(self, shard: Shard, destination: torch.Tensor) -> None:
        with torch.no_grad():
            copy_values(destination, self._values(shard))

    def _values(self, shard: Shard) -> torch.Tensor:
        held = self._box(self._by_name[shard.name]).start
        inside = zip(held, shard.box.start, shard.box.stop, strict=True)
        return _local(self._tensors[shard.name])[tuple(slice(low - base, high - base) for base, low, high in inside)]

    def _box(self, spec: TensorSpec) -> Box:
        """Raises PlanError if the tensor is another one than it was, or what a rank holds is no box."""
        tensor = self._tensors.get(spec.name)
        if tensor is None or tuple(tensor.shape) != spec.shape:
            found = "gone" if tensor is None else f"now of shape {tuple(tensor.shape)}"
            raise PlanError(f"{spec.name}, of shape {spec.shape}, is {found}: make a new publisher for another model")
        if not isinstance(tensor, DTensor):
            return Box.whole(spec.shape)
        if any(type(placement) not in (Sharded, Replicate) for placement in tensor.placements):
            raise PlanError(f"{spec.name} with placements {tensor.placements} is no box on every rank")
        shape, offset = local_box(tensor)
        return Box(tuple(offset), tuple(start + size for start, size in zip(offset, shape, strict=True)))


def _local(tensor: torch.Tensor) -> torch.Tensor:
    local: torch.Tensor = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return local.detach()


def _named_tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    """Parameters and what else a checkpoint holds, each once: tied weights under their first name."""
    if any("FullyShardedDataParallel" in type(module).__name__ for module in model.modules()):
        raise ConfigError("FSDP1 keeps parameters flat: shard with torch's fully_shard (FSDP2), or pass named tensors")
    found: dict[str, torch.Tensor] = {_cleaned(name): parameter for name, parameter in model.named_parameters()}
    for prefix, module in model.named_modules():
        for name, buffer in module.named_buffers(recurse=False):
            if is_persistent(module, name):
                found[_cleaned(f"{prefix}.{name}" if prefix else name)] = buffer
    return found


def _cleaned(name: str) -> str:
    *inside, leading = WRAPPERS
    for wrapper in inside:
        name = name.replace(wrapper, "")
    return name.removeprefix(leading)
