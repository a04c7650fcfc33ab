"""What was found, and the tokens whose probabilities differ most."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from verl.mismatch.causes import VERSIONS_APART, Cause
from verl.mismatch.compare import Phase, Place
from verl.mismatch.places import LOG_PROBS, LOGITS, NORM
from verl.mismatch.recording import Recording, Sampling


@dataclass(frozen=True, kw_only=True)
class Token:
    """One token of a response."""

    sequence: int
    index: int
    token: int
    engine: float
    """The probability with which the engine sampled it,"""
    trainer: float
    """and the one that the trainer gives it."""
    why: str

    @property
    def difference(self) -> float:
        return abs(self.engine - self.trainer)


@dataclass(frozen=True, kw_only=True)
class Findings:
    """The result of a comparison."""

    model: str
    architecture: str
    engine: str
    dtype: str
    tensor_parallel_size: int
    causes: list[Cause]
    places: list[Place]
    """In the order of computation."""
    tokens: list[Token]
    """Those of all responses, the largest difference first."""
    not_compared: list[str] = field(default_factory=list)
    """Kinds of places that the engine does not show."""

    @property
    def mean(self) -> float:
        """As `training/rollout_probs_diff_mean`."""
        return sum(token.difference for token in self.tokens) / max(len(self.tokens), 1)

    @property
    def largest(self) -> float:
        return max((token.difference for token in self.tokens), default=0.0)

    @property
    def first(self) -> Place | None:
        """The first place that is beyond rounding."""
        return next((place for place in self.places if place.beyond), None)

    def passes(self, tolerance: float) -> bool:
        return not self.causes and self.mean <= tolerance

    def as_dict(self) -> dict[str, Any]:
        """For a file of JSON."""
        return asdict(self) | {"rollout_probs_diff_mean": self.mean, "rollout_probs_diff_max": self.largest}


def differing(found: Mapping[str, Phase], recording: Recording, sampling: Sampling, caused: bool) -> list[Token]:
    """All tokens of responses, the largest difference first. `caused`: a cause is known, which explains them all."""
    decode, prefill = found["decode"], found["prefill"]
    own = decode.trainer[LOGITS].float() / sampling.temperature
    rows = {decode.rows[row]: place for place, row in enumerate(decode.predicting)}
    flips = _flips(decode)
    tokens = []
    for sequence, (ids, scores) in enumerate(zip(recording.tokens, recording.scores, strict=True)):
        for index, log_probs in sorted(scores.get(LOG_PROBS, {}).items()):
            if (sequence, index - 1) not in rows or index < recording.prompts[sequence]:
                continue
            row, token = rows[sequence, index - 1], ids[index]
            here = decode.predicting[row]
            why = "the cause above" if caused else _why(here, decode, prefill, flips)
            tokens.append(
                Token(
                    sequence=sequence,
                    index=index,
                    token=token,
                    engine=float(log_probs[token].exp()),
                    trainer=float(own[row].log_softmax(-1)[token].exp()),
                    why=why,
                )
            )
    return sorted(tokens, key=lambda token: -token.difference)


def another_trainer(
    tokens: Sequence[Token], prompts: Sequence[int], kept: Sequence[Sequence[float | None] | None]
) -> list[Cause]:
    """Whether a run's trainer gave the tokens other probabilities than transformers' model of the files does.

    `prompts`: tokens of each prompt. `kept`: the run's log-probs of the responses, where they are known.
    """
    differences = []
    for token in tokens:
        before = kept[token.sequence] if token.sequence < len(kept) else None
        place = token.index - prompts[token.sequence]
        if before is not None and place < len(before) and (log_prob := before[place]) is not None:
            differences.append(abs(math.exp(log_prob) - token.trainer))
    mean = sum(differences) / max(len(differences), 1)
    if mean <= VERSIONS_APART:
        return []
    text = (
        f"the run's trainer gave {len(differences)} tokens other probabilities than transformers' model of the "
        f"checkpoint, by {mean:.2g} in the mean: it computes rows, positions or weights differently"
    )
    return [Cause(name="the run's trainer", place=LOG_PROBS, text=text)]


def _why(row: int, decode: Phase, prefill: Phase, flips: Mapping[int, str]) -> str:
    sequence, index = decode.rows[row]
    before = [flips[other] for other in range(row - index, row + 1) if other in flips]
    if before:
        return f"router flip: {before[0]}"
    if NORM in decode.engine and NORM in prefill.engine and (sequence, index) in prefill.rows:
        at = prefill.rows.index((sequence, index))
        one, other = decode.engine[NORM][row].double(), prefill.engine[NORM][at].double()
        whole = (one - decode.trainer[NORM][row].double()).norm()
        if whole > 0 and (one - other).norm() > 0.5 * whole:
            return "attention: decode against prefill"
    return "rounding"


def _flips(decode: Phase) -> dict[int, str]:
    """By row, where the first of its routers has chosen other experts in the engine than in the trainer."""
    flips: dict[int, str] = {}
    for name, top_k in decode.top_k.items():
        if name not in decode.engine:
            continue
        one, other = (
            values[name].float().topk(top_k).indices.sort().values for values in (decode.engine, decode.trainer)
        )
        for row in (one != other).any(-1).nonzero().flatten().tolist():
            flips.setdefault(row, name)
    return flips
