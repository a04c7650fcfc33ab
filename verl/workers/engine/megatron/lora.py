"""LoRA on Megatron: small trainable matrices beside its frozen linear layers, cut as `adapted` says.

Each rank merges alone for syncs and exports: it holds the parts of A and B that belong to its part of W.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch.nn import functional

from verl.checkpoint_engine.plan.types import Box
from verl.workers.engine.adapters import A, B, base_tensors
from verl.workers.engine.megatron import library
from verl.workers.engine.megatron.architectures import Cut
from verl.workers.engine.megatron.layout import Dimensions, LocalTensor, ParallelSizes
from verl.workers.engine.tensors import HeldTensor, Part


def attach(
    model: torch.nn.Module, tensors: Sequence[LocalTensor], dims: Dimensions, sizes: ParallelSizes, *, scale: float
) -> None:
    """Give the linear layers of a rank's `GPTModel` the adapters among `tensors`, which are this rank's."""
    rows = {tensor.name: tensor.row for tensor in tensors}
    for name, row in rows.items():
        prefix, _, part = name.rpartition(".adapter.")
        if part != "a":
            continue
        layer: Any = model.get_submodule(prefix)
        weight = rows[f"{prefix}.weight"]
        adapter = Adapter(
            {name.removesuffix(".weight"): dims.shape(shape)[0] for name, shape in weight.hugging_face.items()},
            [name.removesuffix(A) for name in row.hugging_face],
            inputs=layer.weight.shape[1],
            outputs=layer.weight.shape[0],
            groups=dims.groups // sizes.tensor if weight.cut is Cut.QUERY_GROUPS else 1,
            rank=dims.rank,
            scale=scale,
            by_columns=weight.cut is Cut.COLUMNS,
            sequence_parallel=layer.sequence_parallel,
        )
        layer.adapter = adapter.to(layer.weight)
        layer.register_forward_hook(_add)


def keep_gradients(model: Any) -> None:
    """Make the first layer's inputs require gradients: embeddings are frozen, and recomputation would pass none."""
    if model.pre_process:
        model.embedding.register_forward_hook(lambda _, __, embedded: embedded.requires_grad_())


def _add(layer: Any, inputs: tuple[Any, ...], outputs: tuple[torch.Tensor, Any]) -> tuple[torch.Tensor, Any]:
    """Linear layers of Megatron's return their output, and a bias if someone else is to add it."""
    output, bias = outputs
    return output + layer.adapter(inputs[0]), bias


class Adapter(torch.nn.Module):
    """The adapter of one of Megatron's linear layers, for all or some of the Hugging Face layers in it."""

    def __init__(
        self,
        numel: Mapping[str, int],
        adapted: Sequence[str],
        *,
        inputs: int,
        outputs: int,
        groups: int,
        rank: int,
        scale: float,
        by_columns: bool,
        sequence_parallel: bool,
    ) -> None:
        """`numel` has the outputs of each Hugging Face layer over all ranks, in their order in a group.

        This rank has `inputs` and `outputs` of the whole layer, and `groups` groups.
        """
        super().__init__()
        self._groups, self._rank, self._scale = groups, rank, scale
        self._by_columns, self._sequence_parallel = by_columns, sequence_parallel
        each = outputs // groups
        self._widths = {layer: each * count // sum(numel.values()) for layer, count in numel.items()}
        """Outputs in a group."""
        self._adapted = tuple(adapted)
        rows = groups * sum(self._widths[layer] for layer in adapted)
        self.a = torch.nn.Parameter(torch.zeros(rank * len(adapted), inputs))
        self.b = torch.nn.Parameter(torch.zeros(rows, rank))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """[s, b, outputs] from [s, b, inputs], with this rank's inputs and outputs."""
        narrow = functional.linear(inputs, self.a) * self._scale
        if self._by_columns:  # what the ranks have is a sum's terms
            add_up = (
                library.reduce_scatter_to_sequence_parallel_region
                if self._sequence_parallel
                else library.reduce_from_tensor_model_parallel_region
            )
            return functional.linear(add_up(narrow), self.b)
        # The ranks' outputs differ from here on. Their gradients meet here, where they are narrow, and not at `inputs`.
        narrow = (
            library.gather_from_sequence_parallel_region(narrow)
            if self._sequence_parallel
            else library.copy_to_tensor_model_parallel_region(narrow)
        )
        of_layer = dict(zip(self._adapted, narrow.split(self._rank, dim=-1), strict=True))
        widths = [self._widths[layer] for layer in self._adapted]
        factors = torch.split(self.b.view(self._groups, -1, self._rank), widths, dim=1)
        b_of = dict(zip(self._adapted, factors, strict=True))
        parts = [
            functional.linear(of_layer[layer], b_of[layer].flatten(0, 1)).view(*narrow.shape[:-1], self._groups, width)
            if layer in of_layer
            else narrow.new_zeros(*narrow.shape[:-1], self._groups, width)
            for layer, width in self._widths.items()
        ]
        return torch.cat(parts, dim=-1).flatten(-2)


def merged(tensors: Mapping[str, HeldTensor], scale: float) -> dict[str, HeldTensor]:
    """`tensors` of this rank under the names without adapters, whose values are read with adapters merged."""
    found = {}
    for name, tensor in base_tensors(tensors).items():
        layer = name.removesuffix(".weight")
        if name.endswith(".weight") and layer + A in tensors:
            tensor = _merged(tensor, tensors[layer + A], tensors[layer + B], scale)
        found[name] = tensor
    return found


def _merged(base: HeldTensor, a: HeldTensor, b: HeldTensor, scale: float) -> HeldTensor:
    parts = [replace(part, delta=functools.partial(_delta, a, b, scale)) for part in base.parts]
    return replace(base, parts=tuple(parts))


@torch.no_grad()
def _delta(a: HeldTensor, b: HeldTensor, scale: float, box: Box) -> torch.Tensor:
    """float32, of the shape of `box`."""
    (row, column), (last_row, last_column) = box.start, box.stop
    rows = _values(b, Box((row, 0), (last_row, b.shape[1])))
    columns = _values(a, Box((0, column), (a.shape[0], last_column)))
    return (rows @ columns).mul_(scale)


def _values(tensor: HeldTensor, box: Box) -> torch.Tensor:
    """float32. A part of W lies in one part of each, whatever the cut."""
    part: Part = next(part for part in tensor.parts if part.box.contains(box))
    offsets = zip(part.box.start, box.start, box.stop, strict=True)
    return part.values()[tuple(slice(start - base, stop - base) for base, start, stop in offsets)].float()
