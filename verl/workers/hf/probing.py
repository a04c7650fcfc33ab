"""How sequences may go through a model together, asked of a small one of the same configuration.

The answer is held against the model as transformers builds it, which has each sequence alone.
"""

from __future__ import annotations

import hashlib
import logging
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, TypeVar

import torch
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel
from transformers.utils import logging as transformers_logging

from verl.compat.transformers import remembers_tokens
from verl.workers.hf.packing import SHARED, attend_sequences_apart, row_inputs, scales_by_column
from verl.workers.hf.regimes import Regimes
from verl.workers.hf.shrinking import SHRINKINGS, VOCABULARY, shrunk

logger = logging.getLogger(__name__)

LENGTHS = (6, 19, 27, 27, 40)
"""Shorter and longer than whatever a small model sees at once, and than what its positions are made for."""
NEIGHBOURHOODS = ((0, 4, 2, 1, 3), (3, 2, 0), (4, 1))
"""Sequences that share a call, in this order: each is in two of them, beside others and elsewhere."""
MOST_PARAMETERS = 60_000_000
TOLERANCE = 1e-2
"""Of outputs, in their standard deviations. Another grouping of sums rounds far below, another context is far above."""

Build = Callable[[PretrainedConfig, str | None], PreTrainedModel]
"""A model of this configuration, with this implementation of attention (None: transformers' choice)."""


class Way(IntEnum):
    """How sequences go through a model: each is safe where the next one is."""

    NONE = -1
    """Not even one by one it is what transformers computes."""
    ALONE = 0
    ROWS = 1
    PACKED = 2


@dataclass(frozen=True, slots=True)
class Finding:
    way: Way
    """The furthest that changes nothing, of those that were asked about."""
    why: str = ""
    """Not further, in words."""


class NoProbe(Exception):
    """No small model can be asked; says why, in words."""


_FOUND: dict[str, Any] = {}
"""By digests of what was asked."""


def find_way(
    config: PretrainedConfig, build: Build, implementation: str | None, *, furthest: Way, shared: bool = False
) -> Finding:
    """How far sequences may go together in a model of `config`, `furthest` at most. No collective.

    `shared`: with the attention of rows that ranks share. Takes little memory and a second at most, and no random
    numbers of anybody else. Implementations of attention that a CPU has not are not asked: torch's is, in their place.
    """

    def find() -> Finding:
        try:
            return Probe.of(config, build, implementation).find(furthest, shared)
        except NoProbe as exc:
            return Finding(Way.ALONE, str(exc))

    return answered(config, f"{implementation} {furthest} {shared}", find)


_Answer = TypeVar("_Answer")


def answered(config: PretrainedConfig, question: str, find: Callable[[], _Answer]) -> _Answer:
    """What `find` returns, asked once for a configuration, with random numbers, warnings and messages of its own."""
    key = f"{type(config).__name__} {config.to_json_string(use_diff=False)} {question}"
    digest = hashlib.sha256(key.encode()).hexdigest()
    if digest not in _FOUND:
        with _aside():
            _FOUND[digest] = find()
    found: _Answer = _FOUND[digest]
    return found


@contextmanager
def _aside() -> Iterator[None]:
    verbosity = transformers_logging.get_verbosity()
    transformers_logging.set_verbosity(logging.ERROR)
    try:
        with torch.random.fork_rng(devices=[]), warnings.catch_warnings(), torch.no_grad():
            warnings.simplefilter("ignore")
            torch.manual_seed(0)
            yield
    finally:
        transformers_logging.set_verbosity(verbosity)


def _pair(
    config: PretrainedConfig, build: Build, implementation: str | None
) -> tuple[PreTrainedModel, PreTrainedModel]:
    """The same weights twice: as transformers computes them one after the other, and as we do."""
    with torch.device("meta"):
        size = sum(parameter.numel() for parameter in build(config, implementation).parameters())
    if size > MOST_PARAMETERS:
        raise ValueError(f"{size} parameters")
    ours = build(config, implementation).train(False)
    for parameter in ours.parameters():
        noise = torch.randn(parameter.shape)
        values = noise / parameter.shape[-1] ** 0.5 if parameter.dim() > 1 else parameter + 0.1 * noise
        parameter.copy_(values)
    original = build(config, "eager").train(False)
    original.load_state_dict(ours.state_dict())
    return original, ours


class Probe:
    """One small model, and what is right for it."""

    def __init__(self, original: nn.Module, ours: PreTrainedModel) -> None:
        self.original, self.model = original, ours
        self._trouble = ""
        """What the model said where it could not be computed."""
        self._regimes = Regimes(ours)
        self.sequences = [torch.randint(1, VOCABULARY - 1, (length,)) for length in LENGTHS]
        # The shortest come first: what models remember of the length of earlier calls does not change these.
        self._right = [original(input_ids=ids[None], use_cache=False).logits[0].float() for ids in self.sequences]

    @classmethod
    def of(cls, config: PretrainedConfig, build: Build, implementation: str | None) -> Probe:
        """Raises NoProbe."""
        asked = implementation if implementation in (None, "eager") else "sdpa"
        problem = ""
        for of_a_kind, narrow in SHRINKINGS:
            try:
                small = shrunk(config, of_a_kind=of_a_kind, narrow=narrow)
                return cls(*_pair(small, build, asked))
            except Exception as exc:  # a class of models may raise anything about a configuration
                problem = f"no small model of its configuration can be computed ({type(exc).__name__}: {exc})"
                logger.debug("no probe of %s", type(config).__name__, exc_info=True)
        raise NoProbe(problem)

    def is_right(self, index: int, values: torch.Tensor, position: int | None = None) -> bool:
        """Whether `values` are the logits of the sequence of this index: of all its tokens, or of one."""
        right = self._right[index]
        expected = right if position is None else right[position]
        return bool((values.float() - expected).abs().max() <= TOLERANCE * right.std())

    def find(self, furthest: Way, shared: bool) -> Finding:
        name = type(self.model).__name__
        if self._differs(in_rows, [(index,) for index in range(len(LENGTHS))]):
            return Finding(Way.NONE, f"{name} computes something else in rows of one sequence" + self._trouble)
        if self._differs(in_rows, NEIGHBOURHOODS):
            return Finding(Way.ALONE, f"a sequence changes in {name} with those beside it" + self._trouble)
        if furthest < Way.PACKED:
            return Finding(Way.ROWS)
        if remembers_tokens(self.model) or scales_by_column(self.model):
            return Finding(Way.ROWS, f"{name} mixes sequences that are in one row")
        if shared:
            self.model.set_attn_implementation(SHARED)
        else:
            attend_sequences_apart(self.model)
        if self._differs(_packed, NEIGHBOURHOODS):
            return Finding(Way.ROWS, f"a sequence changes in {name} with its place in a row" + self._trouble)
        return Finding(Way.PACKED)

    def _differs(self, compute: _Compute, groups: Sequence[Sequence[int]]) -> bool:
        for group in groups:
            for together in self._of_a_regime(group):
                try:
                    self._regimes.forget()
                    found = compute(self.model, [self.sequences[index] for index in together])
                except Exception as exc:  # what cannot be computed so is computed otherwise
                    self._trouble = f" ({exc})"
                    logger.debug("%s raises in a probe", type(self.model).__name__, exc_info=True)
                    return True
                if not all(map(self.is_right, together, found)):
                    return True
        return False

    def _of_a_regime(self, group: Sequence[int]) -> list[list[int]]:
        """As micro-batches are cut."""
        found: dict[Any, list[int]] = {}
        for index in group:
            found.setdefault(self._regimes.of(LENGTHS[index]), []).append(index)
        return list(found.values())


_Compute = Callable[[PreTrainedModel, Sequence[torch.Tensor]], list[torch.Tensor]]


def in_rows(model: Any, sequences: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Logits [length, vocabulary] of each sequence [length], which have a row each."""
    ids = nn.utils.rnn.pad_sequence(list(sequences), batch_first=True)
    lengths = torch.tensor([len(sequence) for sequence in sequences], device=ids.device)
    columns = torch.arange(ids.shape[1], device=ids.device)
    mask = (columns < lengths[:, None]).long()
    logits = model(input_ids=ids, attention_mask=mask, position_ids=columns * mask, use_cache=False).logits
    return [row[: len(sequence)] for row, sequence in zip(logits, sequences, strict=True)]


def _packed(model: Any, sequences: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    lengths = [len(sequence) for sequence in sequences]
    positions = torch.cat([torch.arange(length) for length in lengths])[None]
    given = row_inputs(model, torch.cat(list(sequences))[None], positions, lengths)
    return list(model(**given, use_cache=False).logits[0].split(lengths))
