"""What one FSDP2 rank holds of the weights, for the checkpoint engine. No method communicates."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from verl.checkpoint_engine.errors import PlanError
from verl.checkpoint_engine.types import Box, Shard, TensorSpec
from verl.workers.engine.fsdp.tensors import check_names, checkpoint_tensors, local_part, reshard, tied_aliases


@dataclass(frozen=True, slots=True)
class _Part:
    box: Box
    tensor: torch.Tensor
    """The whole (distributed) tensor: its local part is looked up at every copy, as loading may replace it."""


class FSDP2WeightSource:
    """Implements `verl.checkpoint_engine.ports.WeightSource` for a model that `fully_shard` has sharded.

    A `Shard(0)` parameter is a range of rows, which is contiguous. Ranks that hold the same rows (hybrid sharding)
    declare the same boxes; the planner chooses who sends. With offloaded parameters the host copies are read.

    Tied embeddings are sent once under the embedding's name, as Hugging Face checkpoints have it. `rollout_dtype`
    applies to floating-point parameters; buffers keep their dtype.
    """

    def __init__(self, *, model: nn.Module, rollout_dtype: str, checkpoint_names: Iterable[str] | None = None) -> None:
        """`checkpoint_names`, where known, are the names the rollout engine was told to expect.

        Raises PlanError that lists every name in which the model differs from them.
        """
        reshard(model)
        tensors = checkpoint_tensors(model)
        if checkpoint_names is not None:
            check_names(tensors, checkpoint_names, tied_aliases(model), type(model).__name__)
        parameters = {name for name, _ in model.named_parameters()}
        self._parts = {name: _Part(local_part(tensor)[0], tensor) for name, tensor in tensors.items()}
        self._specs = tuple(
            TensorSpec(
                name=name,
                shape=tuple(tensor.shape),
                dtype=rollout_dtype if name in parameters and tensor.is_floating_point() else _dtype_name(tensor.dtype),
            )
            for name, tensor in tensors.items()
        )

    def specs(self) -> Sequence[TensorSpec]:
        return self._specs

    def shards(self) -> Sequence[Shard]:
        return tuple(Shard(name, part.box) for name, part in self._parts.items() if part.box.numel)

    @torch.no_grad()
    def copy(self, shard: Shard, destination: torch.Tensor) -> None:
        """One `Tensor.copy_`: it casts, crosses devices and handles strides at memory speed."""
        part = self._parts.get(shard.name)
        if part is None or not _contains(part.box, shard.box):
            held = "nothing" if part is None else str(part.box)
            raise PlanError(f"this rank was asked for {shard.box} of {shard.name} and holds {held}")
        _, local = local_part(part.tensor)
        offsets = zip(part.box.start, shard.box.start, shard.box.stop, strict=True)
        destination.copy_(local[tuple(slice(start - base, stop - base) for base, start, stop in offsets)])


def _contains(outer: Box, inner: Box) -> bool:
    return len(outer.start) == len(inner.start) and all(
        o_start <= i_start and i_stop <= o_stop
        for o_start, i_start, i_stop, o_stop in zip(outer.start, inner.start, inner.stop, outer.stop, strict=True)
    )


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
