"""Fill a trainer rank with its part of a checkpoint, and check at the end of a build that the rank still holds it."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import xxhash

from verl.checkpoint_engine.errors import PlanError

if TYPE_CHECKING:
    from verl.workers.engine.tensors import HeldTensor, Part
    from verl.workers.hf.checkpoint import HFCheckpoint

BLOCK_NBYTES = 2**20
"""Bytes that are cast, digested and copied at a time: a core's cache holds them."""
MAX_NAMES_IN_MESSAGE = 20


@dataclass(frozen=True)
class Filled:
    """The digests of the values with which this rank was filled."""

    digests: tuple[tuple[str, Part, int], ...]
    """(tensor, part, xxh3 of the file's bytes of this part, cast to the dtype in which they are held)"""

    @torch.no_grad()
    def require(self, what: str) -> None:
        """Raises PlanError naming every tensor of which this rank does not hold the file's values any more."""
        wrong = {name: None for name, part, expected in self.digests if _digest(_blocks(part.values())) != expected}
        if wrong:
            names = ", ".join(list(wrong)[:MAX_NAMES_IN_MESSAGE])
            raise PlanError(
                f"after {what} was built, {len(wrong)} tensors do not hold the values of its checkpoint: {names}; this "
                "is a fault of the trainer, not of the checkpoint (actor_rollout_ref.model.check_load=false trains on)"
            )


@torch.no_grad()
def fill(tensors: Mapping[str, HeldTensor], checkpoint: HFCheckpoint, *, zero: Collection[str] = ()) -> Filled:
    """Read this rank's parts of `tensors`, cast to the dtype in which it holds them. Those in `zero` become 0."""
    digests = []
    for name, tensor in tensors.items():
        for part in tensor.parts:
            held = part.values()
            if name in zero:
                held.zero_()
                continue
            digest = xxhash.xxh3_64()
            for target, block in zip(_blocks(held), _blocks(checkpoint.read(name, part.box)), strict=True):
                cast = block.to(held.dtype).contiguous()
                digest.update(_bytes(cast))
                target.copy_(cast)
            digests.append((name, part, digest.intdigest()))
    return Filled(tuple(digests))


@torch.no_grad()
def require_equal(name: str, other: str, tensor: HeldTensor, checkpoint: HFCheckpoint) -> None:
    """Raises PlanError if the checkpoint holds a tied tensor twice, as `name` and `other`, with different values."""
    for part in tensor.parts:
        if not torch.equal(checkpoint.read(name, part.box), checkpoint.read(other, part.box)):
            raise PlanError(
                f"the model's config ties {other} to {name}, and the checkpoint holds different values of the two; "
                "set tie_word_embeddings to false in its config.json if they are two tensors"
            )


def _blocks(values: torch.Tensor) -> Iterator[torch.Tensor]:
    """`values` by rows. How many rows go together depends on the shape alone."""
    if values.dim() == 0 or values.numel() == 0:
        yield values
        return
    rows = max(BLOCK_NBYTES // (4 * math.prod(values.shape[1:]) or 1), 1)
    for low in range(0, values.shape[0], rows):
        yield values[low : low + rows]


def _digest(blocks: Iterator[torch.Tensor]) -> int:
    digest = xxhash.xxh3_64()
    for block in blocks:
        digest.update(_bytes(block.cpu().contiguous()))
    return digest.intdigest()


def _bytes(values: torch.Tensor) -> memoryview:
    return values.reshape(-1).view(torch.uint8).numpy().data
