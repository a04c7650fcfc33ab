"""Restore the state of one number of ranks on another number: each rank reads its parts from their holders."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from verl.checkpoint_engine.backends.tcp import TcpWire
from verl.checkpoint_engine.errors import IntegrityError
from verl.checkpoint_engine.plan.sync_plan import SyncPlan
from verl.checkpoint_engine.plan.types import Box
from verl.workers.engine.snapshots import Place, Places, State
from verl.workers.memory_checkpoint.reading import CONNECTIONS, READ_WITHIN_S, read_into, require_pieces


@dataclass(frozen=True)
class StateDescription:
    """The description of one rank's state."""

    plan: bytes
    places: Places | None
    """The places of its tensors; None: only the same number of ranks can restore it."""


@dataclass(frozen=True)
class Left:
    """The state that one rank left, and the memory from which it can be read."""

    wire: bytes
    address: int
    digests: bytes
    description: StateDescription


class Resharded(Mapping[str, torch.Tensor]):
    """A mapping from the names of this rank's snapshot to tensors, each assembled in host memory on access.

    An access raises IntegrityError if a part is missing or differs from its digest, and TransportError. A context
    manager.
    """

    def __init__(self, own: State, places: Places, left: Sequence[Left], *, host: str) -> None:
        """`own`: this rank's present snapshot. `host`: its address."""
        self._own, self._places, self._left = own, places, left
        self._plans = [SyncPlan.decode(one.description.plan) for one in left]
        self._holders: dict[str, dict[Box, tuple[int, str, Place]]] = {}
        """By tensor of the whole model and box: who left it, in which tensor, and where in that."""
        self._shared: dict[str, int] = {}
        """Who left what all have alike."""
        for rank, (one, plan) in enumerate(zip(left, self._plans, strict=True)):
            assert one.description.places is not None  # the driver has looked
            for name in plan.layout.index:
                if name not in one.description.places:
                    self._shared.setdefault(name, rank)
            for name, parts in one.description.places.items():
                for place in parts:
                    self._holders.setdefault(place.tensor, {}).setdefault(place.box, (rank, name, place))
        self._wire = TcpWire(host, CONNECTIONS, listens=False)
        self._connected: set[int] = set()

    def check(self) -> None:
        """Read all tensors once, so that `restore` cannot fail on them."""
        for name in self:
            self[name]

    def __getitem__(self, name: str) -> torch.Tensor:
        own = self._own[name].detach()
        if not own.numel():
            return own
        read: dict[tuple[int, str], torch.Tensor] = {}
        if name not in self._places:
            if name not in self._shared:
                raise IntegrityError(f"no rank has left {name}")
            return self._read(self._shared[name], name, read)
        made = own.to("cpu", copy=True)  # what is in no place, such as padding, stays as it is
        for place in self._places[name]:
            target = made[_slices(place.within)].view(place.box.shape)
            filled = 0
            for box, (rank, theirs, at) in self._holders.get(place.tensor, {}).items():
                if (common := overlap(box, place.box)) is not None:
                    values = self._read(rank, theirs, read)[_slices(at.within)].view(box.shape)
                    target[_slices(common, place.box)] = values[_slices(common, box)]
                    filled += common.numel
            if filled != place.box.numel:
                raise IntegrityError(f"of {place.tensor} {filled} of {place.box.numel} elements were left")
        return made

    def __iter__(self) -> Iterator[str]:
        return iter(self._own)

    def __len__(self) -> int:
        return len(self._own)

    def __enter__(self) -> Resharded:
        return self

    def __exit__(self, *_: object) -> None:
        self._wire.close()

    def _read(self, rank: int, name: str, read: dict[tuple[int, str], torch.Tensor]) -> torch.Tensor:
        """The tensor `name` that `rank` left, once its pieces are known to be right; `read` has those before it."""
        if (rank, name) not in read:
            left, plan = self._left[rank], self._plans[rank]
            if rank not in self._connected:
                self._wire.connect(rank, left.wire, READ_WITHIN_S)
                self._connected.add(rank)
            position = plan.layout.index[name]
            spec, base = plan.layout.specs[position], plan.layout.offsets[position]
            memory = np.empty(spec.nbytes, np.uint8)
            read_into(memory, self._wire, left.address + base, member=rank)
            require_pieces(memory, base, plan, np.flatnonzero(plan.boxes.tensor == position), left.digests, rank)
            read[rank, name] = torch.from_numpy(memory).view(getattr(torch, spec.dtype)).view(spec.shape)
        return read[rank, name]


def overlap(one: Box, other: Box) -> Box | None:
    """The elements in both boxes."""
    start = tuple(map(max, one.start, other.start))
    stop = tuple(map(min, one.stop, other.stop))
    return Box(start, stop) if all(low < high for low, high in zip(start, stop, strict=True)) else None


def _slices(box: Box, outer: Box | None = None) -> tuple[slice, ...]:
    """`box` as an index of what holds `outer`."""
    base = outer.start if outer is not None else (0,) * len(box.start)
    return tuple(
        slice(start - first, stop - first) for start, stop, first in zip(box.start, box.stop, base, strict=True)
    )
