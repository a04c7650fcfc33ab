"""What training changes of what a rank holds, as tensors, for checkpoints in memory."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol, runtime_checkable

import torch

from verl.checkpoint_engine.plan.types import Box

State = Mapping[str, torch.Tensor]


@dataclass(frozen=True, slots=True)
class Place:
    """What a part of a snapshot's tensor is of a tensor of the whole model."""

    tensor: str
    box: Box
    """Of that tensor. Two places of one tensor, on whatever ranks, have equal boxes or none of their elements in
    common."""
    within: Box
    """Where these elements are in the snapshot's tensor, in the same order."""


Places = Mapping[str, Sequence[Place]]
"""By the names of a snapshot."""


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


@runtime_checkable
class Reshardable(Rememberable, Protocol):
    """One whose state another number of ranks can take."""

    def places(self) -> Places:
        """Of each tensor of `snapshot` of which ranks have different parts. What is left out is the same on all that
        have it. No collective."""


@torch.no_grad()
def copy_into(own: State, saved: State) -> None:
    """For `restore`: fill the tensors of a snapshot of one's own."""
    for name, tensor in own.items():
        tensor.copy_(saved[name])


def under(prefix: str, state: State) -> State:
    """The part of `state` whose names begin so, without that."""
    return _Under(prefix, state)


def placed_under(prefix: str, places: Places) -> Places:
    """The inverse, for what a state's tensors are."""
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
