"""Writing a Hugging Face model directory from a Megatron model: rank 0 collects one tensor after the other."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
import torch.distributed as dist

from verl.workers.engine.megatron.layout import Piece


class TensorCollector:
    """Whole tensors on rank 0, from the first rank that holds each piece. Every rank knows what every rank holds."""

    def __init__(
        self,
        pieces_by_rank: list[list[Piece]],
        shapes: Mapping[str, tuple[int, ...]],
        *,
        dtypes: Mapping[str, torch.dtype],
    ) -> None:
        self._shapes, self._dtypes = shapes, dtypes
        self._owners: dict[str, list[tuple[int, Piece]]] = {name: [] for name in shapes}
        seen = set()
        for rank, pieces in enumerate(pieces_by_rank):
            for piece in pieces:
                if (piece.name, piece.box) not in seen:
                    seen.add((piece.name, piece.box))
                    self._owners[piece.name].append((rank, piece))

    def collect(self, name: str, values: Callable[[Piece], torch.Tensor]) -> dict[str, torch.Tensor]:
        """The tensor by its name on rank 0; `values` are this rank's. A collective, in the order of all ranks."""
        if dist.get_rank() == 0:
            return {name: self._receive(name, values)}
        for owner, piece in self._owners[name]:
            if owner == dist.get_rank():
                dist.send(self._own(piece, values), dst=0)
        return {}

    def _receive(self, name: str, values: Callable[[Piece], torch.Tensor]) -> torch.Tensor:
        whole = torch.empty(self._shapes[name], dtype=self._dtypes[name])
        for owner, piece in self._owners[name]:
            if owner == 0:
                part = self._own(piece, values)
            else:
                dist.recv(part := torch.empty(piece.box.shape, dtype=self._dtypes[name]), src=owner)
            whole[tuple(map(slice, piece.box.start, piece.box.stop))] = part
        return whole

    def _own(self, piece: Piece, values: Callable[[Piece], torch.Tensor]) -> torch.Tensor:
        return values(piece).to(device="cpu", dtype=self._dtypes[piece.name]).contiguous()
