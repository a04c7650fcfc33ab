"""Write a Hugging Face model directory, or adapters, from a Megatron model: rank 0 collects one tensor at a time."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from verl.utils.disk import full_disk_told
from verl.utils.first_rank import FirstRank
from verl.workers.config import HFModelConfig
from verl.workers.engine.adapters import A, in_peft, write_peft
from verl.workers.engine.megatron.layout import Piece
from verl.workers.engine.tensors import HeldTensor
from verl.workers.hf.checkpoint import HFCheckpoint
from verl.workers.hf.directory import write_hf_directory


def export_hf(
    directory: Path,
    tensors: Mapping[str, HeldTensor],
    pieces_by_rank: Iterable[Iterable[Piece]],
    model_config: HFModelConfig,
    *,
    dtype: torch.dtype | None,
    own_config: Any | None,
) -> None:
    """Write `tensors`, of which every rank gives its parts, as a model. A collective.

    At `dtype`, by default that of each tensor in the directory that the model came from.
    """
    with HFCheckpoint(Path(model_config.path)) as checkpoint:
        own, common = checkpoint.names, checkpoint.common_dtype()
        dtypes = {name: dtype or (checkpoint.dtype(name) if name in own else common) for name in tensors}
    collector = TensorCollector(pieces_by_rank, tensors, dtypes=dtypes)
    write_hf_directory(
        directory,
        {name: math.prod(tensor.shape) * dtypes[name].itemsize for name, tensor in tensors.items()},
        lambda name: collector.collect(name),
        model_config=model_config,
        dtype=dtype,
        own_config=own_config,
    )


def save_peft(
    directory: Path,
    tensors: Mapping[str, HeldTensor],
    pieces_by_rank: Iterable[Iterable[Piece]],
    model_config: HFModelConfig,
) -> None:
    """Write adapters as peft does. `tensors` have the names of `adapters`. A collective."""
    dtypes = {name: tensor.dtype for name, tensor in tensors.items()}
    collector = TensorCollector(pieces_by_rank, tensors, dtypes=dtypes)
    whole = {in_peft(name): tensor for key in tensors for name, tensor in collector.collect(key).items()}
    layers = [name.removesuffix(A) for name in tensors if name.endswith(A)]
    nbytes = sum(math.prod(tensor.shape) * tensor.dtype.itemsize for tensor in tensors.values())
    with full_disk_told(directory, nbytes), FirstRank() as first:
        first.do(lambda: write_peft(directory, whole, model_config, layers))


class TensorCollector:
    """Collects whole tensors on rank 0, each piece from the first rank that holds it."""

    def __init__(
        self,
        pieces_by_rank: Iterable[Iterable[Piece]],
        tensors: Mapping[str, HeldTensor],
        *,
        dtypes: Mapping[str, torch.dtype],
    ) -> None:
        """`tensors`: those to collect."""
        self._tensors, self._dtypes = tensors, dtypes
        self._owners: dict[str, list[tuple[int, Piece]]] = {name: [] for name in tensors}
        seen = set()
        for rank, pieces in enumerate(pieces_by_rank):
            for piece in pieces:
                if piece.name in tensors and (piece.name, piece.box) not in seen:
                    seen.add((piece.name, piece.box))
                    self._owners[piece.name].append((rank, piece))

    def collect(self, name: str) -> dict[str, torch.Tensor]:
        """Return the named tensor on rank 0. A collective, called in the same order on all ranks."""
        if dist.get_rank() == 0:
            return {name: self._receive(name)}
        for owner, piece in self._owners[name]:
            if owner == dist.get_rank():
                dist.send(self._own(piece), dst=0)
        return {}

    def _receive(self, name: str) -> torch.Tensor:
        whole = torch.empty(self._tensors[name].shape, dtype=self._dtypes[name])
        for owner, piece in self._owners[name]:
            if owner == 0:
                part = self._own(piece)
            else:
                dist.recv(part := torch.empty(piece.box.shape, dtype=self._dtypes[name]), src=owner)
            whole[tuple(map(slice, piece.box.start, piece.box.stop))] = part
        return whole

    @torch.no_grad()
    def _own(self, piece: Piece) -> torch.Tensor:
        part = next(part for part in self._tensors[piece.name].parts if part.box == piece.box)
        values = part.values()
        if part.delta is not None:
            values = part.delta(part.box).add_(values)
        return values.to(device="cpu", dtype=self._dtypes[piece.name]).contiguous()
