"""Find, with a small model, how to decode step by step with the same results as from whole sequences."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from transformers import PretrainedConfig

from verl.workers.hf.probing import LENGTHS, NEIGHBOURHOODS, TOLERANCE, Build, NoProbe, NotComputed, Probe, answered
from verl.workers.hf.regimes import Regimes
from verl.workers.rollout.hf.batch import DecodeBatch, Decoding, cache_name

PROMPT_SHARE = 3
"""The prompt is one PROMPT_SHARE-th of a probe's sequence, so that windows end during decoding."""


@dataclass(frozen=True, slots=True)
class Found:
    decoding: Decoding | None
    """The fastest way with correct results. None: even the slowest differs from transformers."""
    why: str = ""
    """Why not a faster way, in words."""
    changes_later: bool = False
    """Whether later tokens change the model's output for a token, so that log-probs of whole sequences differ."""
    sure: bool = True
    """Whether no error occurred that another run might not have."""

    @classmethod
    def of(cls, decoding: int | None, why: str, changes_later: bool, sure: bool) -> Found:
        return cls(None if decoding is None else Decoding(decoding), why, changes_later, sure)


def find_decoding(config: PretrainedConfig, build: Build, implementation: str | None, *, lasts: bool = False) -> Found:
    """Find the way to decode sequences of a model of `config`, with this implementation of attention.

    Results are compared with transformers' own model, called with each sequence alone and no cache. `lasts`: see
    `answered`.
    """

    def find() -> Found:
        try:
            return _Decoded(Probe.of(config, build, implementation)).find()
        except NotComputed as exc:
            return Found(None, str(exc), sure=False)
        except NoProbe as exc:
            return Found(Decoding.ALONE, str(exc), sure=False)

    return answered(config, f"decoding {implementation}", find, Found, lasts=lasts)


class _Decoded:
    """The sequences of a probe, each from its first tokens on."""

    def __init__(self, probe: Probe) -> None:
        self._probe = probe
        self._name = type(probe.model).__name__
        self._changes_later = False
        self._sure = True
        self._grown: dict[tuple[int, int], torch.Tensor] = {}
        """Logits after so many tokens of a sequence, by the untouched model that has no others."""

    def find(self) -> Found:
        if ahead := self._probe.looks_ahead():
            return Found(None, ahead)
        why = ""
        for decoding in sorted(Decoding, reverse=True):
            problem = self._what_differs(decoding)
            if changed := self._probe.changes_parameters():
                return Found(None, changed)
            if problem is None:
                return Found(decoding, why, self._changes_later, self._sure)
            why = why or f"{self._name}: {problem}"
        why = f"{self._name} is not what transformers' eager attention computes"
        return Found(None, why, sure=self._sure)

    def _what_differs(self, decoding: Decoding) -> str | None:
        if decoding is Decoding.CACHED:
            if cache_name(self._probe.model) is None:
                return "it takes no cache"
            if Regimes(self._probe.model):
                return "its rotary embeddings depend on how long a sequence is, and a cache keeps older ones"
        try:
            right = all(self._is_right(decoding, group) for group in NEIGHBOURHOODS)
        except Exception as exc:  # noqa: BLE001 - what cannot be computed so is computed otherwise
            self._sure = False
            return f"{type(exc).__name__}: {exc}"
        if right:
            return None
        return "a cache changes it" if decoding is Decoding.CACHED else "a sequence changes with those beside it"

    def _is_right(self, decoding: Decoding, group: Sequence[int]) -> bool:
        batch = DecodeBatch(self._probe.model, decoding=decoding)
        lengths = {index: max(1, LENGTHS[index] // PROMPT_SHARE) for index in group}
        while lengths:
            given = [self._probe.sequences[index][:length].tolist() for index, length in lengths.items()]
            found = batch.next_logits(given)
            if not all(map(self._foretells, lengths, lengths.values(), found)):
                return False
            going_on = [row for row, (index, length) in enumerate(lengths.items()) if length < LENGTHS[index]]
            lengths = {index: length + 1 for index, length in lengths.items() if length < LENGTHS[index]}
            if lengths and len(going_on) < len(found):
                batch.keep(going_on)
        return True

    def _foretells(self, index: int, length: int, logits: torch.Tensor) -> bool:
        """Whether these are the logits after so many tokens of a sequence."""
        if self._probe.is_right(index, logits, length - 1):
            return True
        if (index, length) not in self._grown:
            self._grown[index, length] = self._probe.alone(self._probe.sequences[index][:length])[-1]
        expected = self._grown[index, length]
        right = bool((logits.float() - expected).abs().max() <= TOLERANCE * expected.std())
        self._changes_later |= right
        return right
