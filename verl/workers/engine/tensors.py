"""The tensors of a sharded model's checkpoint, and this rank's parts of each. No collectives."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import nn

from verl.checkpoint_engine.compat.fsdp import clean_tensor_name
from verl.checkpoint_engine.compat.torch import is_persistent
from verl.checkpoint_engine.plan.types import Box
from verl.workers.hf.conversion import Conversion
from verl.workers.hf.rearranged import Piece


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """A box of one tensor whose elements this rank holds."""

    box: Box
    values: Callable[[], torch.Tensor]
    """Returns its present values, of shape `box.shape`, borrowed. Call it at every use: a load may replace them."""
    delta: Callable[[Box], torch.Tensor] | None = None
    """Computes the float32 values to add to a part of `box` before it is sent. None: nothing to add."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldTensor:
    """One tensor of the whole model, and the parts of it that this rank holds: none, one or several."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    is_parameter: bool
    parts: tuple[Part, ...]

    @classmethod
    def whole(cls, tensor: torch.Tensor, *, is_parameter: bool) -> HeldTensor:
        """A tensor that this rank holds whole."""
        shape = tuple(tensor.shape)
        part = Part(box=Box.whole(shape), values=tensor.detach)
        return cls(shape=shape, dtype=tensor.dtype, is_parameter=is_parameter, parts=(part,))


def named_parameters(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """Parameters under the model's names, without names of wrappers; tied ones once, under their first name."""
    return ((clean_tensor_name(name), parameter) for name, parameter in model.named_parameters())


def persistent_buffers(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """The buffers that a checkpoint holds. Buffers computed from the config (rotary `inv_freq`) are not persistent."""
    for prefix, module in model.named_modules():
        for name, buffer in module.named_buffers(recurse=False):
            if is_persistent(module, name):
                yield clean_tensor_name(f"{prefix}.{name}" if prefix else name), buffer


def as_in_checkpoint(tensors: Mapping[str, HeldTensor], conversion: Conversion) -> dict[str, HeldTensor]:
    """Convert `tensors` of a model to those of its checkpoint: single experts, as boxes of the held stack.

    Tensors that the checkpoint lacks come last, under the names that they have in the model.
    """
    found = {name: _origin(name, shape, tensors, conversion) for name, shape in conversion.shapes.items()}
    return found | {name: tensor for name, tensor in tensors.items() if name not in conversion.pieces}


def _origin(name: str, shape: tuple[int, ...], tensors: Mapping[str, HeldTensor], conversion: Conversion) -> HeldTensor:
    parts = []
    for target, piece in conversion.parts_of(name):
        tensor = tensors[target]
        for part in tensor.parts:
            if inner := piece.narrowed(part.box):
                delta = part.delta and functools.partial(_delta, part.delta, inner)
                parts.append(Part(box=inner.origin_box, values=functools.partial(_values, part, inner), delta=delta))
    return HeldTensor(shape=shape, dtype=tensor.dtype, is_parameter=tensor.is_parameter, parts=tuple(parts))


def _values(part: Part, piece: Piece) -> torch.Tensor:
    offsets = zip(part.box.start, piece.box.start, piece.box.stop, strict=True)
    return piece.to_origin(part.values()[tuple(slice(start - base, stop - base) for base, start, stop in offsets)])


def _delta(delta: Callable[[Box], torch.Tensor], piece: Piece, box: Box) -> torch.Tensor:
    inner = piece.in_rearranged(box)
    assert inner is not None  # `box` lies in the part that this is the delta of
    return piece.to_origin(delta(inner))


def tied_aliases(model: nn.Module) -> frozenset[str]:
    """Further names of tied parameters, such as `lm_head.weight` of a model with tied embeddings."""
    first = {name for name, _ in named_parameters(model)}
    every = {clean_tensor_name(name) for name, _ in model.named_parameters(remove_duplicate=False)}
    return frozenset(every - first)
