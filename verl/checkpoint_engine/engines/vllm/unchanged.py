"""What of a version a vLLM worker need not load, because it computes with those values already.

vLLM's reload leaves a layer as it is that nothing is loaded into. A layer is loaded whole or not at all, and a tensor
goes to every layer that it fills: layers hang together by the tensors that they share, and those are kept of which no
tensor changed. Who fills what is noted while everything is loaded, by the memory that loaders are handed.
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
"""Of a version's bytes: where less than such a part is unchanged, everything is loaded."""


class Sources:
    """By layer, the tensors of a checkpoint that are loaded into it."""

    def __init__(self) -> None:
        self.layers: dict[str, set[str]] = {}
        self.are_known = True
        """Loaders were handed nothing but parts of tensors as they lie in memory."""
        self._lent: list[tuple[int, int, str]] = []

    def lending(self, weights: Iterable[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
        """`weights`, each of which lies elsewhere, and stays there."""
        for name, tensor in weights:
            if tensor.numel():
                insort(self._lent, (tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes, name))
            yield name, tensor

    def note(self, layer: str, values: Iterable[Any]) -> None:
        """A loader of `layer` is handed `values`."""
        for value in values:
            if isinstance(value, torch.Tensor) and value.numel():
                address = value.data_ptr()
                position = bisect_right(self._lent, (address, 2**64, "")) - 1
                if position < 0 or address >= self._lent[position][1]:
                    self.are_known = False
                else:
                    self.layers.setdefault(layer, set()).add(self._lent[position][2])

    def left_out(self) -> list[str]:
        """Tensors that no loader was handed. While all of them are lent."""
        taken = {name for names in self.layers.values() for name in names}
        return sorted(name for _, _, name in self._lent if name not in taken) if self.are_known else []

    def forget_places(self) -> None:
        """Everything is loaded."""
        self._lent.clear()


@dataclass(frozen=True)
class Kept:
    """Layers that stay as they are, and the tensors of which they were loaded."""

    layers: frozenset[str] = frozenset()
    names: frozenset[str] = frozenset()


def kept(layers: Mapping[str, Collection[str]], unchanged: Collection[str]) -> Kept:
    """The layers all of whose tensors are `unchanged` and fill no layer that is loaded. Pure."""
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
        """Tensors all of whose pieces have the digests that they had."""
        if now.plan.digest != self.plan:
            return set()
        changed = set(now.plan.boxes.tensor[self.digests != now.digests].tolist())
        return {spec.name for index, spec in enumerate(now.plan.layout.specs) if index not in changed}

    def kept(self, now: Manifest, among: Collection[str] | None) -> Kept:
        """What stays as it is with `now`; nothing where it is not worth it. `among`: these layers at most."""
        if not self.sources.are_known:
            return Kept()
        layers = self.sources.layers
        found = kept(layers, self.unchanged(now))
        if among is not None and not found.layers <= set(among):
            excluded = {name for layer in found.layers - set(among) for name in layers[layer]}
            found = kept(layers, found.names - excluded)
        nbytes = sum(spec.nbytes for spec in now.plan.layout.specs if spec.name in found.names)
        return found if LEAST_SHARE * nbytes >= now.plan.layout.payload_nbytes else Kept()
