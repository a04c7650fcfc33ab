"""Which tensors of a sharded model make up its checkpoint, and which parts of each this rank holds. No collectives."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import nn
from torch.distributed.fsdp._common_utils import clean_tensor_name

from verl.checkpoint_engine.errors import PlanError
from verl.checkpoint_engine.types import Box
from verl.utils.experts import ExpertMatrix, expert_matrices


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """A box of one tensor whose elements this rank holds."""

    box: Box
    values: Callable[[], torch.Tensor]
    """Its present values, of shape `box.shape`, borrowed. To be called at every use, as loading may replace them."""
    delta: Callable[[Box], torch.Tensor] | None = None
    """What comes on top of the values in a part of `box` before they are sent: float32, made anew. None: nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldTensor:
    """One tensor of the whole model, and the parts of it that this rank holds: none, one or several."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    is_parameter: bool
    parts: tuple[Part, ...]

    @classmethod
    def whole(cls, tensor: torch.Tensor, *, is_parameter: bool) -> HeldTensor:
        """A tensor that every rank has."""
        shape = tuple(tensor.shape)
        part = Part(box=Box.whole(shape), values=tensor.detach)
        return cls(shape=shape, dtype=tensor.dtype, is_parameter=is_parameter, parts=(part,))


def named_parameters(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """Under the names of the checkpoint, whatever wraps the modules; tied ones once, under their first name."""
    return ((clean_tensor_name(name), parameter) for name, parameter in model.named_parameters())


def persistent_buffers(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Those that a checkpoint holds. Those that are computed from the config (rotary `inv_freq`) are not persistent."""
    for prefix, module in model.named_modules():
        for name, buffer in module.named_buffers(recurse=False):
            if name not in module._non_persistent_buffers_set:
                yield clean_tensor_name(f"{prefix}.{name}" if prefix else name), buffer


def split_experts(tensors: Mapping[str, HeldTensor], model_type: str) -> dict[str, HeldTensor]:
    """`tensors` of a model as its checkpoint has them: experts by themselves, as boxes of what is held of the stack."""
    found: dict[str, HeldTensor] = {}
    for name, tensor in tensors.items():
        matrices = expert_matrices(model_type, name, tensor.shape)
        found |= {matrix.name: _expert(tensor, matrix) for matrix in matrices} or {name: tensor}
    return found


def _expert(stack: HeldTensor, matrix: ExpertMatrix) -> HeldTensor:
    parts = []
    for part in stack.parts:
        (expert, row, column), (last_expert, last_row, last_column) = part.box.start, part.box.stop
        first, last = max(row, matrix.first), min(last_row, matrix.last)
        if expert <= matrix.expert < last_expert and first < last:
            box = Box((first - matrix.first, column), (last - matrix.first, last_column))
            rows = slice(first - row, last - row)
            parts.append(Part(box=box, values=functools.partial(_rows, part, matrix.expert - expert, rows)))
    return HeldTensor(
        shape=(matrix.last - matrix.first, stack.shape[2]),
        dtype=stack.dtype,
        is_parameter=stack.is_parameter,
        parts=tuple(parts),
    )


def _rows(part: Part, expert: int, rows: slice) -> torch.Tensor:
    return part.values()[expert, rows]


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
    first = {name for name, _ in named_parameters(model)}
    every = {clean_tensor_name(name) for name, _ in model.named_parameters(remove_duplicate=False)}
    return frozenset(every - first)
