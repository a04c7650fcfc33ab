"""Find sequences that may share a call of a model whose rotary embeddings depend on the longest sequence.

`longrope` has two sets of frequencies, for calls up to a length and beyond it; `dynamic` has others for every longest
position, and keeps those of the longest call so far. A sequence comes out as it does alone if all those of its call
have the same frequencies alone, and if no earlier call is remembered.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch import nn

LONGROPE = "longrope"
DYNAMIC = "dynamic"
"""Kinds of RoPE with this in their names."""
FROM_LONGEST = frozenset({DYNAMIC, LONGROPE})
"""Kinds of RoPE that every call computes from its largest position."""

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
    """The regimes of sequences in `model`. Without such embeddings all sequences have the same regime."""

    def __init__(self, model: nn.Module) -> None:
        self._stretched = sorted(set(_stretched(model)), key=lambda found: (found.kind, found.original))

    def __bool__(self) -> bool:
        """Whether there is more than one regime."""
        return bool(self._stretched)

    def of(self, length: int) -> Regime:
        """The regime of each sequence. Sequences of equal regimes may share a call."""
        return tuple(found.regime(length) for found in self._stretched)

    def forget(self) -> None:
        """Reset the model's memory of earlier lengths, before a call."""
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


def why_engine_differs(config: Any, engine: str, longest: int) -> str | None:
    """Describe how vLLM or SGLang rotate differently from transformers for sequences up to `longest`; empty if equal.

    The text can be continued with a remedy. `config` is that of the text model.
    tests/models/test_engine_ropes.py holds this against vLLM; other kinds of RoPE agree.
    """
    for rope in ropes(config):
        kind = str(rope.get("rope_type"))
        limit = getattr(config, "max_position_embeddings", None)
        if limit is None:
            return None
        if kind == LONGROPE and (problem := _why_longrope_differs(rope, limit, engine, longest)):
            return problem
        if DYNAMIC in kind and (longest > limit or engine == "sglang"):
            how, remedy = ("all", "") if engine == "sglang" else ("none", f"make sequences no longer than {limit}, or ")
            return (
                f"rope_type={kind}: transformers stretches positions of sequences of more than "
                f"max_position_embeddings={limit} tokens, {engine} of {how}: {remedy}"
            )
    return None


def _why_longrope_differs(rope: dict[str, Any], limit: int, engine: str, longest: int) -> str | None:
    original = rope["original_max_position_embeddings"]
    of_lengths = [(rope.get(f"short_{what}"), rope.get(f"long_{what}")) for what in ("factor", "mscale")]
    if longest > original and any(short != long for short, long in of_lengths):
        how = "for all" if engine == "vllm" else "for those that are computed beside a longer one, too"
        return (
            f"rope_type={LONGROPE}: transformers takes the long factors for sequences of more than "
            f"original_max_position_embeddings={original} tokens, {engine} {how}: make sequences no longer than "
            f"{original}, give short_factor the values of long_factor in model.override_config.rope_parameters, or "
        )
    if "short_mscale" in rope:
        return None
    scale = rope.get("attention_factor") or _scale(rope.get("factor") or limit / original, original)
    if not math.isclose(scale, of_engine := _scale(limit / original, original), rel_tol=1e-6):
        return (
            f"rope_type={LONGROPE}: transformers scales attention by {scale:.4g}, {engine} by {of_engine:.4g}: set "
            f"model.override_config.rope_parameters.attention_factor={of_engine:.8g}, or "
        )
    return None


def _scale(factor: float, original: int) -> float:
    """LongRoPE (arXiv 2402.13753), as transformers and vLLM have it."""
    return math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 else 1.0


def ropes(config: Any) -> Iterator[dict[str, Any]]:
    """The parameters of rotary embeddings, of all kinds of layers."""
    found = getattr(config, "rope_parameters", None) or {}
    yield from (rope for rope in (found, *found.values()) if isinstance(rope, dict))
