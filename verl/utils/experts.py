"""Mixtures of experts: transformers stacks the experts of a layer in one parameter, checkpoints and engines do not.

The names of the checkpoint are those of a sync. One entry of `STACKED` serves loading, export and the weight source.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Stack:
    """A parameter [experts, rows, columns] `<layer>.<name>`; its rows are those of `matrices`, in equal shares."""

    name: str
    matrices: tuple[str, ...]
    """Names in the checkpoint, where `{}` is the number of the expert."""


_QWEN = (
    Stack(
        name="mlp.experts.gate_up_proj",
        matrices=("mlp.experts.{}.gate_proj.weight", "mlp.experts.{}.up_proj.weight"),
    ),
    Stack(name="mlp.experts.down_proj", matrices=("mlp.experts.{}.down_proj.weight",)),
)
STACKED: dict[str, tuple[Stack, ...]] = {"qwen2_moe": _QWEN, "qwen3_moe": _QWEN}
"""By `model_type`. An architecture that is not here has its parameters as its checkpoint has them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertMatrix:
    """Where one matrix of a checkpoint lies in a stacked parameter: `parameter[expert, first:last]`."""

    name: str
    expert: int
    first: int
    last: int


def expert_matrices(model_type: str, name: str, shape: Sequence[int]) -> tuple[ExpertMatrix, ...]:
    """What a checkpoint has in the place of the parameter `name`; nothing if it has the parameter itself."""
    stack = next((stack for stack in STACKED.get(model_type, ()) if name.endswith(f".{stack.name}")), None)
    if stack is None:
        return ()
    layer, rows = name.removesuffix(stack.name), shape[1] // len(stack.matrices)
    return tuple(
        ExpertMatrix(name=layer + matrix.format(expert), expert=expert, first=index * rows, last=(index + 1) * rows)
        for expert in range(shape[0])
        for index, matrix in enumerate(stack.matrices)
    )
