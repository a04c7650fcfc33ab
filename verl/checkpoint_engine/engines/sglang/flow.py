"""Follow the values of lent tensors while a model's own loaders copy them."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Mapping
from functools import cached_property
from typing import Any

import torch

from ...compat.torch import TorchDispatchMode, changed_by, changes_arguments, tensors_in


class Flow(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records which lent tensors a load reads and writes where, by address: loaders slice, transpose and rename them.

    A tensor that a loader makes from a lent one (transposed, converted, concatenated) counts as that one. Tensors that
    equal a read one count as read: a tied head has the same bytes twice.
    """

    def __init__(self, lent: Mapping[str, torch.Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._lent = dict(lent)
        by_address = sorted((tensor.data_ptr(), name) for name, tensor in lent.items() if tensor.nbytes)
        self._starts, self._names = [start for start, _ in by_address], [name for _, name in by_address]
        self._made: dict[int, tuple[torch.Tensor, frozenset[str]]] = {}
        """By the address of their storage: tensors that loaders made, kept so that no other takes the address."""
        self._read: set[str] = set()
        self._widened: set[str] = set()
        self._written: set[int] = set()
        """Addresses of storages that something was copied into."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        sources = frozenset().union(*map(self._sources_of, tensors_in((args, kwargs))))
        if not sources:
            return result
        if changes_arguments(func):
            for target in changed_by(func, args, kwargs):
                self._note(sources, target)
            return result
        for made in tensors_in(result):
            if made.nbytes and not self._is_lent(made):
                address = made.untyped_storage().data_ptr()
                before = self._made.get(address, (made, frozenset()))[1]
                self._made[address] = made, before | sources
        return result

    def _note(self, sources: frozenset[str], target: torch.Tensor) -> None:
        address = target.untyped_storage().data_ptr()
        if address in self._made:  # of a loader's own, on its way to the model
            self._made[address] = self._made[address][0], self._made[address][1] | sources
            return
        self._read |= sources
        self._written.add(address)
        if target.dtype == torch.float32:
            self._widened |= {name for name in sources if self._lent[name].dtype.itemsize < target.dtype.itemsize}

    def _sources_of(self, tensor: torch.Tensor) -> frozenset[str]:
        if not tensor.nbytes:
            return frozenset()
        if (made := self._made.get(tensor.untyped_storage().data_ptr())) is not None:
            return made[1]
        name = self._name_at(tensor.data_ptr())
        return frozenset([name]) if name is not None else frozenset()

    def _name_at(self, address: int) -> str | None:
        index = bisect_right(self._starts, address) - 1
        if index < 0:
            return None
        name = self._names[index]
        return name if address < self._starts[index] + self._lent[name].nbytes else None

    def _is_lent(self, tensor: torch.Tensor) -> bool:
        return self._name_at(tensor.data_ptr()) is not None

    @cached_property
    def brings_nan(self) -> bool:
        """Whether a lent tensor holds a NaN. A NaN in the model then does not show an unfilled value."""
        return any(bool(torch.isnan(t.float()).any()) for t in self._lent.values() if t.dtype.is_floating_point)

    def wrote(self, tensor: torch.Tensor) -> bool:
        """Whether a loader wrote to the storage of `tensor`."""
        return tensor.untyped_storage().data_ptr() in self._written

    def unread(self) -> list[str]:
        """The names of lent tensors that no loader wrote to the model, sorted."""
        read = [self._lent[name] for name in self._read]
        return sorted(name for name, tensor in self._lent.items() if name not in self._read and not _in(tensor, read))

    def widened(self) -> list[str]:
        """The names of lent tensors that arrived rounded for a float32 tensor of the model, sorted."""
        return sorted(self._widened)


def _in(tensor: torch.Tensor, others: Iterable[torch.Tensor]) -> bool:
    return any(
        tensor.dtype == other.dtype and tensor.shape == other.shape and torch.equal(tensor, other) for other in others
    )
