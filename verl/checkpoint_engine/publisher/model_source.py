"""A `WeightSource` of this process's part of a torch module, or of named tensors. No method communicates."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn.utils.parametrize import is_parametrized
from torch.optim.swa_utils import AveragedModel

from ..compat.fsdp import local_boxes
from ..compat.torch import changes_of, is_persistent, tied_names
from ..errors import ConfigError
from ..memory.publishing import copy_values
from ..plan.layout import listed
from ..plan.types import ITEMSIZE, Box, Shard, TensorSpec
from ..support.finite import extremes, named_extremes

WRAPPERS = ("_orig_mod.", "_checkpoint_wrapped_module.", "module.")
"""What `torch.compile`, activation checkpointing and DDP add to names; the last one only at their beginning."""
COMPUTED_FROM = ("orig", "g")
"""Suffixes of parameters from which `torch.nn.utils` computes a weight (pruning, spectral and weight norm)."""
PARAMETERS = ("weight", "bias")
"""Parameters of torch's layers. A plain tensor under such a name is in no checkpoint."""
EXTRA = "_extra_state"
"""The suffix of entries in checkpoints that are no weights."""
KEPT_ELSEWHERE = {
    "ds_id": "divided among ranks by DeepSpeed's ZeRO-3: gather it (GatheredParameters)",
    "quant_state": "packed by bitsandbytes: dequantize the model",
    "SCB": "quantized by bitsandbytes: dequantize the model",
}
"""Attributes of parameters whose values are not the weights: attribute to the cause and the remedy."""


class ModelSource:
    """Reads the model between `refresh` and `release`: names and shardings of the `refresh`, values at each call.

    Of a DTensor (FSDP2, tensor parallelism) this rank holds boxes. Every rank holds any other tensor whole, and rank 0
    sends it: replicas may differ, as running statistics do, and no version may mix them.
    """

    def __init__(
        self,
        model: nn.Module | Mapping[str, torch.Tensor],
        dtype: str | torch.dtype | None = None,
        *,
        allow_nonfinite: bool = False,
    ) -> None:
        """`dtype`: the dtype in which floating-point tensors are sent, such as `bfloat16`; None: their own. Unless
        `allow_nonfinite`, `view` and `copy` raise ConfigError for NaN and for values that are infinite in that dtype.

        Raises ConfigError for an unknown `dtype`, for a `model` that is neither a module nor a mapping, and as
        `refresh`.
        """
        if not isinstance(model, (nn.Module, Mapping)):
            raise ConfigError(
                f"the weights are a torch module or a mapping of named tensors, not {type(model).__name__}"
            )
        sent = getattr(torch, dtype, None) if isinstance(dtype, str) else dtype
        if dtype is not None and not (isinstance(sent, torch.dtype) and sent.is_floating_point):
            raise ConfigError(f"dtype={dtype!r} is no floating-point type of torch, such as bfloat16")
        self._model, self._sent, self._allow_nonfinite = model, sent, allow_nonfinite
        self.sends_whole = True
        """Whether this rank sends the tensors that every rank has whole: rank 0 does."""
        self._tensors: Mapping[str, torch.Tensor] = {}
        self._changes: Mapping[str, int] = {}
        """The number of writes to each tensor at the last `refresh`."""
        self.refresh()

    def refresh(self) -> None:
        """Read the names and shardings of the model's tensors. Called on every rank, on the thread that trains.

        It reshards modules that FSDP2 has gathered, such as the root after a forward pass, because FSDP may free
        gathered values. Raises ConfigError for a model without tensors, FSDP1, unmerged adapters, weights that are
        computed from others or have other names in a checkpoint, and tensors without dense values of their own.
        """
        model = self._model
        self._tensors = _named_tensors(model) if isinstance(model, nn.Module) else _mapped(model)
        if not self._tensors:
            raise ConfigError("there is nothing to publish: the model has no tensors")
        self._require_values()
        self._changes = {name: changes_of(_local(tensor)) for name, tensor in self._tensors.items()}
        self._specs = [
            TensorSpec(name=name, shape=tuple(tensor.shape), dtype=self._dtype_of(tensor))
            for name, tensor in self._tensors.items()
        ]
        self._by_name = {spec.name: spec for spec in self._specs}
        self._boxes = {name: _boxes(name, tensor) for name, tensor in self._tensors.items()}

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
            if not _has_memory(tensor):
                raise ConfigError(
                    f"{name}, a {type(tensor).__name__}, has no memory of its own: push plain tensors of its values"
                )

    def release(self) -> None:
        """Drop the references to the tensors until the next `refresh`, so that the model can free them."""
        self._tensors = {}

    def _dtype_of(self, tensor: torch.Tensor) -> str:
        sent = self._sent if self._sent is not None and tensor.is_floating_point() else tensor.dtype
        return str(sent).removeprefix("torch.")

    def specs(self) -> Sequence[TensorSpec]:
        return self._specs

    def shards(self) -> Sequence[Shard]:
        return [
            Shard(name, box)
            for name, boxes in self._boxes.items()
            if self.sends_whole or isinstance(self._tensors[name], DTensor)
            for box in boxes
            if box.numel
        ]

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
        self._require_unchanged(shard.name)
        return values

    def copy(self, shard: Shard, destination: torch.Tensor) -> None:
        with torch.no_grad():
            values = self._values(shard)
            self._require_finite(shard.name, values)
            copy_values(destination, values)
        self._require_unchanged(shard.name)

    def may_be_equal(self, name: str, other: str) -> bool:
        """False if two tensors of one shape and dtype differ in this rank's part; True if it has different parts."""
        boxes = self._boxes[name]
        if [*boxes] != [*self._boxes[other]]:
            return True
        pairs = ((self._values(Shard(one, box)).contiguous() for one in (name, other)) for box in boxes)
        return all(torch.equal(first.view(torch.uint8), second.view(torch.uint8)) for first, second in pairs)

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

    def _require_unchanged(self, name: str) -> None:
        """One step of training between two tensors would make a version that no model ever was."""
        if changes_of(_local(self._tensors[name])) != self._changes[name]:
            raise ConfigError(f"{name} was written into while the weights were copied: train on when push has returned")

    def _values(self, shard: Shard) -> torch.Tensor:
        boxes, box = self._boxes[shard.name], shard.box
        held = next(one for one in boxes if one.contains(box))
        bounds = zip(boxes[held], held.start, box.start, box.stop, strict=True)
        inside = (slice(at.start + low - base, at.start + high - base) for at, base, low, high in bounds)
        return _local(self._tensors[shard.name])[tuple(inside)]


def _boxes(name: str, tensor: torch.Tensor) -> Mapping[Box, Sequence[slice]]:
    """What this rank holds, and where in its local tensor."""
    if not isinstance(tensor, DTensor):
        return {Box.whole(tuple(tensor.shape)): [slice(0, size) for size in tensor.shape]}
    try:
        return {Box(start, stop): inside for start, stop, inside in local_boxes(tensor)}
    except ValueError as exc:
        raise ConfigError(f"{name} cannot be sent: {exc}") from exc


def _local(tensor: torch.Tensor) -> torch.Tensor:
    local: torch.Tensor = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return local.detach().resolve_neg()  # a view that negates has the bits of what it is a view of


def _has_memory(tensor: torch.Tensor) -> bool:
    """Whether what this rank holds lies somewhere. Not so what FSDP has freed, and subclasses around other tensors."""
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    try:
        return local.numel() == 0 or (local.untyped_storage().nbytes() > 0 and local.data_ptr() != 0)
    except RuntimeError:  # torch, of tensors that have no storage
        return False


def _require_kept_in(tensors: Mapping[str, torch.Tensor]) -> None:
    for name, tensor in tensors.items():
        if why := next((why for one, why in KEPT_ELSEWHERE.items() if getattr(tensor, one, None) is not None), ""):
            raise ConfigError(f"{name} is {why}, or pass named tensors")


def _mapped(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    found = dict(tensors)
    for name, tensor in found.items():
        if not isinstance(name, str) or not name or not isinstance(tensor, torch.Tensor):
            raise ConfigError(f"named tensors are torch tensors under names, not {name!r}: {type(tensor).__name__}")
    _require_kept_in(found)
    return found


def _named_tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    """Parameters and what else a checkpoint holds. FSDP2's, sharded."""
    while isinstance(model, AveragedModel):
        model = model.module
    modules = list(model.modules())
    for module in modules:
        if isinstance(module, FSDPModule):
            module.reshard()
    if any("FullyShardedDataParallel" in kind.__name__ for module in modules for kind in type(module).__mro__):
        raise ConfigError("FSDP1 keeps parameters flat: shard with torch's fully_shard (FSDP2), or pass named tensors")
    if adapted := [name for name, module in model.named_modules() if _is_adapted(module)]:
        raise ConfigError(
            f"adapters lie beside their matrices (PEFT), under names that no server has: {listed(adapted)}. Push what "
            "merge_and_unload() returns, or named tensors"
        )
    if computed := [f"{prefix}.{name}".lstrip(".") for prefix, one in model.named_modules() for name in _computed(one)]:
        raise ConfigError(
            f"no parameters, but plain tensors or computed from others: {listed(computed)}. Make it a parameter again "
            "(remove_parametrizations, prune.remove, remove_weight_norm), or pass named tensors"
        )
    found: dict[str, torch.Tensor] = {}
    for name, tensor in _parameters_and_buffers(model):
        if (cleaned := _cleaned(name)) in found:
            raise ConfigError(f"two tensors are {cleaned} without the names of wrappers: pass named tensors")
        found[cleaned] = tensor
    _require_kept_in(found)  # of what bitsandbytes has packed a state_dict has parts with other names, or there is none
    if others := _named_otherwise(model, found):
        raise ConfigError(
            f"its state_dict() has other names or tensors than its modules: {listed(others)}. Push the module that the "
            "server's names are of, or what state_dict() returns, as named tensors"
        )
    return found


def _named_otherwise(model: nn.Module, found: Mapping[str, torch.Tensor]) -> list[str]:
    """What a checkpoint has instead, by a hook or a `state_dict` of its own: wrappers of value heads, fused layers."""
    state = model.state_dict(keep_vars=True)
    kept = {_cleaned(name): tensor for name, tensor in state.items() if isinstance(tensor, torch.Tensor)}
    own = {id(tensor) for tensor in found.values()}
    added = [name for name, tensor in kept.items() if id(tensor) not in own and not name.endswith(EXTRA)]
    return added + [name for name in found if name not in kept]


def _parameters_and_buffers(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Tied weights under their first name, as a checkpoint has them; what a layer that is used twice has, under both:
    a server has two layers."""
    modules = list(model.named_modules(remove_duplicate=False))
    patterns = [key for _, module in modules for key in tied_names(module)]
    names: dict[int, list[str]] = {}
    embedded = set()
    for prefix, module in modules:
        for name, parameter in module.named_parameters(recurse=False):
            names.setdefault(id(parameter), []).append(f"{prefix}.{name}" if prefix else name)
            if isinstance(module, nn.Embedding):
                embedded.add(id(parameter))
    for prefix, module in modules:
        for name, parameter in module.named_parameters(recurse=False):
            first, *others = names[id(parameter)]
            own = f"{prefix}.{name}" if prefix else name
            is_tied = others and (
                id(parameter) in embedded or any(re.search(key, one) for key in patterns for one in (first, *others))
            )
            if own == first or not is_tied:
                yield own, parameter
    for prefix, module in modules:
        for name, buffer in module.named_buffers(recurse=False):
            if is_persistent(module, name):
                yield (f"{prefix}.{name}" if prefix else name), buffer


def _is_adapted(module: nn.Module) -> bool:
    """Whether it stands for a layer, which is inside of it, and adds to what that computes or computes instead."""
    inside = (getattr(module, name, None) for name in ("base_layer", "original_module", "prompt_encoder"))
    return any(isinstance(one, nn.Module) for one in inside)


def _computed(module: nn.Module) -> list[str]:
    """Its weights that are no parameters, but made of others before they are used."""
    if is_parametrized(module):
        return [name for name, _ in module.get_submodule("parametrizations").named_children()]
    made = (name for name, value in vars(module).items() if isinstance(value, torch.Tensor))
    own = {name for name, _ in module.named_parameters(recurse=False)}
    return [name for name in made if name in PARAMETERS or any(f"{name}_{end}" in own for end in COMPUTED_FROM)]


def _cleaned(name: str) -> str:
    *inside, leading = WRAPPERS
    for wrapper in inside:
        name = name.replace(wrapper, "")
    return name.removeprefix(leading)
