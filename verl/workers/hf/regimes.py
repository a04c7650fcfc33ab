"""Rotary embeddings that depend on the longest sequence of a call: which sequences may share one.

`longrope` has two sets of frequencies, for calls up to a length and beyond it; `dynamic` has others for every longest
position, and keeps those of the longest call so far. A sequence comes out as it does alone if all those of its call
have the same frequencies alone, and if no earlier call is remembered.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch import nn

LONGROPE = "longrope"
DYNAMIC = "dynamic"
"""Kinds of RoPE with this in their names."""
FROM_LONGEST = frozenset({DYNAMIC, LONGROPE})
"""Kinds of RoPE that are computed anew from the largest position in a call."""

Regime = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class _Stretched:
    """One set of frequencies of a module: of all its layers, or of one kind of them."""

    module: Any
    kind: str
    prefix: str
    """Of the names of its buffers."""
    original: int
    """Up to so many tokens its frequencies are the original ones."""

    def regime(self, length: int) -> int:
        """Equal for lengths that have the same frequencies."""
        if length <= self.original:
            return 0
        return 1 if self.kind == LONGROPE else length

    def forget(self) -> None:
        if self.kind == LONGROPE:
            # Each call chooses anew. Where kinds of layers differ, transformers takes what it keeps of the first long
            # call for a sign that it need not compute it, and has nothing in its place.
            vars(self.module).pop(f"{self.prefix}long_inv_freq", None)
            return
        names = (f"{self.prefix}{name}" for name in ("max_seq_len_cached", "inv_freq", "original_inv_freq"))
        cached, used, first = names
        setattr(self.module, cached, self.original)
        device = getattr(self.module, used).device
        self.module.register_buffer(used, getattr(self.module, first).to(device), persistent=False)


class Regimes:
    """Of the sequences that `model` computes. Without such embeddings all of them have the same one."""

    def __init__(self, model: nn.Module) -> None:
        self._stretched = sorted(set(_stretched(model)), key=lambda found: (found.kind, found.original))

    def __bool__(self) -> bool:
        """Whether there is more than one."""
        return bool(self._stretched)

    def of(self, length: int) -> Regime:
        """Sequences of equal regimes may share a call."""
        return tuple(found.regime(length) for found in self._stretched)

    def forget(self) -> None:
        """Before a call: the lengths of earlier ones mean nothing to it."""
        for found in self._stretched:
            found.forget()


def _stretched(model: nn.Module) -> Iterator[_Stretched]:
    for module in model.modules():
        kinds: Any = getattr(module, "rope_type", None)
        by_prefix = {f"{layer}_": kind for layer, kind in kinds.items()} if isinstance(kinds, dict) else {"": kinds}
        for prefix, kind in by_prefix.items():
            if kind == LONGROPE or (isinstance(kind, str) and DYNAMIC in kind):
                short = LONGROPE if kind == LONGROPE else DYNAMIC
                yield _Stretched(module, short, prefix, _original(module, short, prefix))


def _original(module: Any, kind: str, prefix: str) -> int:
    if kind == DYNAMIC:
        return int(module.original_max_seq_len)
    parameters = module.config.rope_parameters
    return int((parameters[prefix[:-1]] if prefix else parameters)["original_max_position_embeddings"])
