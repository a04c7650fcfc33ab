"""Find the layers that a vLLM worker need not load, because their tensors have not changed.

vLLM's reload does not change a layer without new tensors. A layer is loaded completely or not at all, and a tensor goes
to every layer that it fills. So layers that share tensors are kept together, if no tensor of theirs has changed. A full
load records the tensors of each layer, by the addresses that its loaders get.
"""

from __future__ import annotations

from bisect import bisect_right, insort
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from ...memory.digest import Manifest, UInt64s

LEAST_SHARE = 16
"""A worker loads everything if less than one LEAST_SHARE-th of the version's bytes is unchanged."""


class Sources:
    """The checkpoint's tensors that fill each layer."""

    def __init__(self) -> None:
        self.layers: dict[str, set[str]] = {}
        self.are_known = True
        """Whether all values that loaders got were views of lent tensors."""
        self._lent: list[tuple[int, int, str]] = []

    def lending(self, weights: Iterable[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
        """Iterate over `weights` and record their addresses, which must be distinct and must stay valid."""
        for name, tensor in weights:
            if tensor.numel():
                insort(self._lent, (tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes, name))
            yield name, tensor

    def note(self, layer: str, values: Iterable[Any]) -> None:
        """Record that a loader of `layer` got `values`."""
        for value in values:
            if isinstance(value, torch.Tensor) and value.numel():
                address = value.data_ptr()
                position = bisect_right(self._lent, (address, 2**64, "")) - 1
                if position < 0 or address >= self._lent[position][1]:
                    self.are_known = False
                else:
                    self.layers.setdefault(layer, set()).add(self._lent[position][2])

    def left_out(self) -> list[str]:
        """The tensors that no loader got. Call it while all tensors are lent."""
        taken = {name for names in self.layers.values() for name in names}
        return sorted(name for _, _, name in self._lent if name not in taken) if self.are_known else []

    def forget_places(self) -> None:
        """Drop the addresses, after the load."""
        self._lent.clear()


@dataclass(frozen=True)
class Kept:
    """Layers that are not loaded again, and the names of their tensors."""

    layers: frozenset[str] = frozenset()
    names: frozenset[str] = frozenset()


def kept(layers: Mapping[str, Collection[str]], unchanged: Collection[str]) -> Kept:
    """The layers whose tensors are all `unchanged` and fill no layer that is loaded. Pure."""
    keep = {layer for layer, names in layers.items() if set(names) <= set(unchanged)}
    while True:
        loaded = {name for layer, names in layers.items() if layer not in keep for name in names}
        fewer = {layer for layer in keep if loaded.isdisjoint(layers[layer])}
        if fewer == keep:
            return Kept(frozenset(keep), frozenset(name for layer in keep for name in layers[layer]))
        keep = fewer


@dataclass(frozen=True)
class Loaded:
    """The version that a worker computes with."""

    version: int
    plan: bytes
    digests: UInt64s
    sources: Sources

    @classmethod
    def of(cls, manifest: Manifest, sources: Sources) -> Loaded:
        return cls(manifest.version, manifest.plan.digest, np.array(manifest.digests), sources)

    def unchanged(self, now: Manifest) -> set[str]:
        """The tensors whose pieces all have the same digests in `now`."""
        if now.plan.digest != self.plan:
            return set()
        changed = set(now.plan.boxes.tensor[self.digests != now.digests].tolist())
        return {spec.name for index, spec in enumerate(now.plan.layout.specs) if index not in changed}

    def kept(self, now: Manifest, among: Collection[str] | None) -> Kept:
        """The layers to keep for `now`, only of `among` if given; none if they are less than a LEAST_SHARE-th."""
        if not self.sources.are_known:
            return Kept()
        layers = self.sources.layers
        found = kept(layers, self.unchanged(now))
        if among is not None and not found.layers <= set(among):
            excluded = {name for layer in found.layers - set(among) for name in layers[layer]}
            found = kept(layers, found.names - excluded)
        nbytes = sum(spec.nbytes for spec in now.plan.layout.specs if spec.name in found.names)
        return found if LEAST_SHARE * nbytes >= now.plan.layout.payload_nbytes else Kept()
