"""What this process holds of a torch module, or of named tensors: a `WeightSource`. No method communicates."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor import Shard as Sharded

from ..compat.fsdp import local_box
from ..compat.torch import is_persistent
from ..errors import ConfigError, PlanError
from ..memory.publishing import copy_values
from ..plan.layout import listed
from ..plan.types import ITEMSIZE, Box, Shard, TensorSpec
from ..support.finite import extremes, named_extremes

WRAPPERS = ("_orig_mod.", "_checkpoint_wrapped_module.", "module.")
"""What `torch.compile`, activation checkpointing and DDP put into names: the last one at their beginning only."""


class ModelSource:
    """Reads names, shardings and values as they are when they are asked for, between `refresh` and `release`.

    A DTensor (FSDP2, tensor parallelism) is the box that this rank holds; any other tensor is on every rank whole.
    """

    def __init__(
        self, model: nn.Module | Mapping[str, torch.Tensor], dtype: str | None = None, *, allow_nonfinite: bool = False
    ) -> None:
        """`dtype`: what floating-point tensors are sent in, `bfloat16` for instance; None: as they are held. Unless
        `allow_nonfinite`, `view` and `copy` raise ConfigError for NaN and for what is infinite in that dtype.

        Raises ConfigError for a `dtype` that torch does not know, and as `refresh`.
        """
        sent = getattr(torch, dtype, None) if dtype is not None else None
        if dtype is not None and not (isinstance(sent, torch.dtype) and sent.is_floating_point):
            raise ConfigError(f"dtype={dtype!r} is no floating-point type of torch, such as bfloat16")
        self._model, self._sent, self._allow_nonfinite = model, sent, allow_nonfinite
        self._tensors: Mapping[str, torch.Tensor] = {}
        self.refresh()

    def refresh(self) -> None:
        """See which tensors the model has now. Called on the thread that trains, on every rank; nothing is copied.

        A module that FSDP2 has gathered, as it leaves the root after a forward pass, is resharded: what is gathered is
        FSDP's to free. Raises ConfigError for what has no tensors, for FSDP1, for adapters beside their matrices, and
        for what is no tensor with values of its own, in order.
        """
        model = self._model
        self._tensors = _named_tensors(model) if isinstance(model, nn.Module) else _mapped(model)
        if not self._tensors:
            raise ConfigError("there is nothing to publish: the model has no tensors")
        self._require_values()
        self._specs = [
            TensorSpec(name=name, shape=tuple(tensor.shape), dtype=self._dtype_of(tensor))
            for name, tensor in self._tensors.items()
        ]
        self._by_name = {spec.name: spec for spec in self._specs}

    def _require_values(self) -> None:
        if empty := [name for name, tensor in self._tensors.items() if tensor.is_meta]:
            raise ConfigError(f"on the meta device there are no values: {listed(empty)}")
        for name, tensor in self._tensors.items():
            dtype = str(tensor.dtype).removeprefix("torch.")
            if torch.nn.parameter.is_lazy(tensor):
                raise ConfigError(f"{name} has no values yet: call the model once")
            if tensor.layout != torch.strided or tensor.is_nested:
                kind = "nested" if tensor.is_nested else f"of the layout {tensor.layout}"
                raise ConfigError(f"{name} is {kind}, not a plain tensor: push its values in order (to_dense())")
            if dtype not in ITEMSIZE:
                raise ConfigError(f"{name} is {dtype}, which is not sent. These are: {', '.join(ITEMSIZE)}")

    def release(self) -> None:
        """Forget the tensors until the next `refresh`: the model may have let go of them."""
        self._tensors = {}

    def _dtype_of(self, tensor: torch.Tensor) -> str:
        sent = self._sent if self._sent is not None and tensor.is_floating_point() else tensor.dtype
        return str(sent).removeprefix("torch.")

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
        if not lies_as_sent or not values.is_contiguous():
            return None
        self._require_finite(shard.name, values)
        return values

    def copy(self, shard: Shard, destination: torch.Tensor) -> None:
        with torch.no_grad():
            values = self._values(shard)
            self._require_finite(shard.name, values)
            copy_values(destination, values)

    def may_be_equal(self, name: str, other: str) -> bool:
        """Whether two tensors of one shape and dtype have the same bits, as far as this rank holds the same of both."""
        boxes = [self._box(self._by_name[one]) for one in (name, other)]
        if boxes[0] != boxes[1]:
            return True
        shard = Shard(name, boxes[0]), Shard(other, boxes[1])
        first, second = (self._values(one).contiguous().view(torch.uint8) for one in shard)
        return torch.equal(first, second)

    def _require_finite(self, name: str, values: torch.Tensor) -> None:
        dtype = getattr(torch, self._by_name[name].dtype)
        if self._allow_nonfinite or not dtype.is_floating_point:
            return
        (low, high), most = extremes(values), torch.finfo(dtype).max
        if not (-most <= low and high <= most):  # nothing compares with NaN
            raise ConfigError(
                f"{name} has {named_extremes(low, high)}, which is not finite in {self._by_name[name].dtype}: an "
                "earlier update failed. allow_nonfinite=True pushes it anyway"
            )

    def _values(self, shard: Shard) -> torch.Tensor:
        held = self._box(self._by_name[shard.name]).start
        inside = zip(held, shard.box.start, shard.box.stop, strict=True)
        return _local(self._tensors[shard.name])[tuple(slice(low - base, high - base) for base, low, high in inside)]

    def _box(self, spec: TensorSpec) -> Box:
        """Raises PlanError if what a rank holds is no box."""
        tensor = self._tensors[spec.name]
        if not isinstance(tensor, DTensor):
            return Box.whole(spec.shape)
        if any(type(placement) not in (Sharded, Replicate) for placement in tensor.placements):
            raise PlanError(f"{spec.name} with placements {tensor.placements} is no box on every rank")
        shape, offset = local_box(tensor)
        return Box(tuple(offset), tuple(start + size for start, size in zip(offset, shape, strict=True)))


def _local(tensor: torch.Tensor) -> torch.Tensor:
    local: torch.Tensor = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return local.detach().resolve_neg()  # a view that negates has the bits of what it is a view of


def _mapped(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    found = dict(tensors)
    for name, tensor in found.items():
        if not isinstance(name, str) or not name or not isinstance(tensor, torch.Tensor):
            raise ConfigError(f"named tensors are torch tensors under names, not {name!r}: {type(tensor).__name__}")
    return found


def _named_tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    """Parameters and what else a checkpoint holds, each once: tied weights under their first name. FSDP2's, sharded."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()
    if any("FullyShardedDataParallel" in type(module).__name__ for module in model.modules()):
        raise ConfigError("FSDP1 keeps parameters flat: shard with torch's fully_shard (FSDP2), or pass named tensors")
    if adapted := [name for name, module in model.named_modules() if _is_adapted(module)]:
        raise ConfigError(
            f"adapters lie beside their matrices (PEFT), under names that no server has: {listed(adapted)}. Push what "
            "merge_and_unload() returns, or named tensors"
        )
    found: dict[str, torch.Tensor] = {_cleaned(name): parameter for name, parameter in model.named_parameters()}
    for prefix, module in model.named_modules():
        for name, buffer in module.named_buffers(recurse=False):
            if is_persistent(module, name):
                found[_cleaned(f"{prefix}.{name}" if prefix else name)] = buffer
    return found


def _is_adapted(module: nn.Module) -> bool:
    """Whether it stands for a layer, which is inside of it, and adds to what that computes."""
    return isinstance(getattr(module, "base_layer", None), nn.Module)


def _cleaned(name: str) -> str:
    *inside, leading = WRAPPERS
    for wrapper in inside:
        name = name.replace(wrapper, "")
    return name.removeprefix(leading)
