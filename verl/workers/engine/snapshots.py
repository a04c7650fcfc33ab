"""What training changes of what a rank holds, as tensors, for checkpoints in memory."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol, runtime_checkable

import torch

State = Mapping[str, torch.Tensor]


@runtime_checkable
class Rememberable(Protocol):
    """A training engine whose state can be kept in memory."""

    def snapshot(self) -> State:
        """All that training changes of what this rank holds, under the same names at any time. No collective.

        Tensors are borrowed: their values stay until the engine calls `before_step`. Small ones may be copies.
        """

    def restore(self, saved: State) -> None:
        """The inverse, in an engine that was built alike. A collective.

        Names, shapes and dtypes are those of `snapshot`; `saved` is borrowed for the call.
        """


@torch.no_grad()
def copy_into(own: State, saved: State) -> None:
    """For `restore`: fill the tensors of a snapshot of one's own."""
    for name, tensor in own.items():
        tensor.copy_(saved[name])


def under(prefix: str, state: State) -> dict[str, torch.Tensor]:
    """The part of `state` whose names begin so, without that."""
    return {name.removeprefix(prefix): tensor for name, tensor in state.items() if name.startswith(prefix)}
