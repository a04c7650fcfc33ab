"""A Megatron rank's tensors under Hugging Face names, for loading, checkpoints and the weight source."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial

import torch

from verl.workers.engine.adapters import is_adapter
from verl.workers.engine.megatron.architectures import Architecture
from verl.workers.engine.megatron.layout import Dimensions, LocalTensor, Piece, tensor_shapes
from verl.workers.engine.tensors import HeldTensor, Part


def held_tensors(
    architecture: Architecture,
    dims: Dimensions,
    tensors: Sequence[LocalTensor],
    weights: Mapping[str, torch.Tensor],
    dtypes: Mapping[bool, torch.dtype],
) -> dict[str, HeldTensor]:
    """Every tensor of the checkpoint and every adapter, in the same order on every rank, and this rank's parts of it.

    `tensors` are this rank's; `weights` are its memory under Megatron's names, of which the parts are views. `dtypes`:
    those of adapters (true) and of other tensors (false).
    """
    parts: dict[str, list[Part]] = {}
    for piece in (piece for tensor in tensors for piece in tensor.pieces):
        parts.setdefault(piece.name, []).append(Part(box=piece.box, values=partial(view, weights, piece)))
    return {
        name: HeldTensor(
            shape=shape, dtype=dtypes[is_adapter(name)], is_parameter=True, parts=tuple(parts.get(name, ()))
        )
        for name, shape in tensor_shapes(architecture, dims).items()
    }


def view(weights: Mapping[str, torch.Tensor], piece: Piece) -> torch.Tensor:
    """A view of a piece's memory."""
    box = piece.local_box
    return weights[piece.local].detach()[tuple(map(slice, box.start, box.stop))]
