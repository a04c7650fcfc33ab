"""The state of a rank that training changes, as tensors, for checkpoints in memory."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol, runtime_checkable

import torch

from verl.checkpoint_engine.plan.types import Box

State = Mapping[str, torch.Tensor]


@dataclass(frozen=True, slots=True)
class Place:
    """The place of a part of a snapshot's tensor in a tensor of the whole model."""

    tensor: str
    box: Box
    """The box in that tensor. Two places of one tensor, on any ranks, have equal or disjoint boxes."""
    within: Box
    """The index of these elements in the snapshot's tensor, in the same order."""


Places = Mapping[str, Sequence[Place]]
"""Names of a snapshot to the places of their tensors."""


@runtime_checkable
class Rememberable(Protocol):
    """A training engine whose state can be kept in memory."""

    def snapshot(self) -> State:
        """The state of this rank that training changes, always under the same names. Not a collective.

        Tensors are borrowed: their values stay until the engine calls `before_step`. Small ones may be copies.
        """

    def restore(self, saved: State) -> None:
        """The inverse of `snapshot`, in an engine of the same configuration. A collective.

        Names, shapes and dtypes are those of `snapshot`; `saved` is borrowed for the call.
        """


@runtime_checkable
class Reshardable(Rememberable, Protocol):
    """A training engine whose state another number of ranks can restore."""

    def places(self) -> Places:
        """The places of each tensor of `snapshot` of which ranks have different parts. Others are equal on all ranks
        that have them. Not a collective."""


@torch.no_grad()
def copy_into(own: State, saved: State) -> None:
    """Fill the tensors of the engine's own snapshot, for `restore`."""
    for name, tensor in own.items():
        tensor.copy_(saved[name])


def under(prefix: str, state: State) -> State:
    """The entries of `state` whose names begin with the prefix, without it."""
    return _Under(prefix, state)


def placed_under(prefix: str, places: Places) -> Places:
    """The inverse of `under`, for places."""
    return {
        prefix + name: [replace(place, tensor=prefix + place.tensor) for place in own] for name, own in places.items()
    }


class _Under(Mapping[str, torch.Tensor]):
    """Values are looked up when they are asked for: they may have to be read first."""

    def __init__(self, prefix: str, state: State) -> None:
        self._prefix, self._state = prefix, state

    def __getitem__(self, name: str) -> torch.Tensor:
        return self._state[self._prefix + name]

    def __iter__(self) -> Iterator[str]:
        return (name.removeprefix(self._prefix) for name in self._state if name.startswith(self._prefix))

    def __len__(self) -> int:
        return sum(1 for _ in self)
