"""What an engine computed, in the terms of places."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch


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
