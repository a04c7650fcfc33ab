"""What an engine computed, in the terms of places."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from verl.mismatch.places import ATTENTION, LOG_PROBS, LOGITS


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """How the engine samples, in vLLM's words."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    repetition_penalty: float = 1.0


@dataclass(kw_only=True)
class Recording:
    """What an engine computed for a number of sequences."""

    tokens: list[list[int]]
    """Prompt and response of each sequence."""
    prompts: list[int]
    """Tokens of each prompt."""
    states: list[dict[str, torch.Tensor]] = field(default_factory=list)
    """Of each sequence, by place: [tokens, width], and `>place` for what a module got. Of the token that is sampled
    last there is nothing: it is computed with the next one."""
    scores: list[dict[str, dict[int, torch.Tensor]]] = field(default_factory=list)
    """Of each sequence, `LOGITS` and `LOG_PROBS`: by the index of the token that they predict, [vocabulary]."""


def assembled(ranks: Sequence[Sequence[Mapping[str, Any]]], recording: Recording) -> Recording:
    """Put the rows of all steps where they belong. Heads of several ranks are put side by side."""
    rows: list[dict[str, dict[int, torch.Tensor]]] = [{} for _ in recording.tokens]
    recording.scores = [{} for _ in recording.tokens]
    for step, *others in zip(*ranks, strict=True):
        for name, tensor in step.items():
            if name in ("rows", "last"):
                continue
            if others and name.rpartition(".")[2] in ATTENTION:
                tensor = torch.cat([tensor, *(other[name] for other in others)], dim=-1)
            for (sequence, index), row in zip(step["rows"], tensor, strict=True):
                rows[sequence].setdefault(name, {})[index] = row
        for name in (LOGITS, LOG_PROBS):
            for (sequence, index), row in zip(step["last"].get("rows", ()), step["last"].get(name, ()), strict=False):
                recording.scores[sequence].setdefault(name, {})[index + 1] = row
    for each in rows:
        recording.states.append({name: torch.stack([by[index] for index in sorted(by)]) for name, by in each.items()})
    return recording
