"""Find out how sequences may share a call of a model, with a small model of the same configuration.

The results are compared with transformers' own model, called with each sequence alone.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from enum import IntEnum
from typing import Any, Protocol, Self, TypeVar

import torch
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel
from transformers.utils import logging as transformers_logging

from verl.compat.transformers import remembers_tokens
from verl.utils.model import EXACT
from verl.workers.hf import answers
from verl.workers.hf.packing import SHARED, attend_sequences_apart, row_inputs, scales_by_column
from verl.workers.hf.regimes import Regimes
from verl.workers.hf.shrinking import SHRINKINGS, VOCABULARY, shrunk

logger = logging.getLogger(__name__)

LENGTHS = (6, 19, 27, 27, 40)
"""Lengths shorter and longer than a small model's windows and positions."""
NEIGHBOURHOODS = ((0, 4, 2, 1, 3), (3, 2, 0), (4, 1))
"""Sequences that share a call, in this order: each is in two of them, beside others and elsewhere."""
MOST_PARAMETERS = 60_000_000
TOLERANCE = 1e-3
"""The tolerance of outputs in their standard deviations: far above rounding, far below the effect of a context."""

Build = Callable[[PretrainedConfig, str | None], PreTrainedModel]
"""Builds a model of a configuration with an implementation of attention (None: transformers' choice)."""


class Way(IntEnum):
    """How sequences share a call of a model. A model that supports one way supports all earlier ones."""

    NONE = -1
    """Even single sequences give other results than transformers."""
    ALONE = 0
    ROWS = 1
    PACKED = 2


@dataclass(frozen=True, slots=True)
class Finding:
    way: Way
    """The last of the tested ways that does not change results."""
    why: str = ""
    """Why not a later way, in words."""
    sure: bool = True
    """Whether no error occurred that another run might not have."""

    @classmethod
    def of(cls, way: int, why: str, sure: bool) -> Finding:
        return cls(Way(way), why, sure)


class NoProbe(Exception):
    """No small model can be built; the text is the reason."""


class NotComputed(NoProbe):
    """Small models can be built, but none of them computes; the cause is not their size."""


_FOUND: dict[str, Any] = {}
"""By digests of what was asked."""


def find_way(
    config: PretrainedConfig,
    build: Build,
    implementation: str | None,
    *,
    furthest: Way,
    shared: bool = False,
    lasts: bool = False,
) -> Finding:
    """The last way, up to `furthest`, in which sequences may share a call of a model of `config`. Not a collective.

    `shared`: with the attention of rows that ranks share. `lasts`: see `answered`. Takes little memory and a second at
    most, and no random numbers of anybody else. Implementations of attention that a CPU has not are not asked: torch's
    is, in their place.
    """

    def find() -> Finding:
        try:
            return Probe.of(config, build, implementation).find(furthest, shared)
        except NotComputed as exc:
            return Finding(Way.NONE, str(exc), sure=False)
        except NoProbe as exc:
            return Finding(Way.ALONE, str(exc), sure=False)

    return answered(config, f"{implementation} {furthest} {shared}", find, Finding, lasts=lasts)


class Answer(Protocol):
    """A dataclass that can be restored from its JSON fields."""

    @property
    def sure(self) -> bool: ...

    @classmethod
    def of(cls, *args: Any, **fields: Any) -> Self: ...


_Answer = TypeVar("_Answer", bound=Answer)


def answered(
    config: PretrainedConfig, question: str, find: Callable[[], _Answer], kind: type[_Answer], *, lasts: bool
) -> _Answer:
    """The result of `find`, called once per configuration, isolated from the caller's random numbers and warnings.

    A sure result for an unmodified model of transformers (`lasts`) is kept on disk for later runs.
    """
    described = config.to_json_string(use_diff=False)
    digest = answers.digest_of(f"{type(config).__name__} {described} {question} within {TOLERANCE}")
    if digest not in _FOUND:
        lasts = lasts and type(config).__module__.startswith("transformers.")
        found = _read(kind, digest) if lasts else None
        if found is None:
            with _aside():
                found = find()
            if lasts and found.sure:
                answers.write(digest, asdict(found))  # type: ignore[call-overload]
        _FOUND[digest] = found
    answer: _Answer = _FOUND[digest]
    return answer


def _read(kind: type[_Answer], digest: str) -> _Answer | None:
    try:
        return kind.of(**answers.read(digest) or {})
    except (TypeError, ValueError):  # there is none, or not in this form
        return None


@contextmanager
def _aside() -> Iterator[None]:
    """One thread: what small models compute is over before several have met, and on a busy machine they wait long."""
    verbosity, num_threads = transformers_logging.get_verbosity(), torch.get_num_threads()
    transformers_logging.set_verbosity(logging.ERROR)
    torch.set_num_threads(1)
    try:
        with torch.random.fork_rng(devices=[]), warnings.catch_warnings(), torch.no_grad():
            warnings.simplefilter("ignore")
            torch.manual_seed(0)
            yield
    finally:
        torch.set_num_threads(num_threads)
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
    """One small model, and its correct outputs."""

    def __init__(self, original: nn.Module, ours: PreTrainedModel) -> None:
        self.original, self.model = original, ours
        self._trouble = ""
        """What the model said where it could not be computed."""
        self._regimes = Regimes(ours)
        self._weights = [parameter.clone() for parameter in ours.parameters()]
        self.sequences = [torch.randint(1, VOCABULARY - 1, (length,)) for length in LENGTHS]
        self._right = [self.alone(ids) for ids in self.sequences]

    @classmethod
    def of(cls, config: PretrainedConfig, build: Build, implementation: str | None) -> Probe:
        """Raises NoProbe."""
        asked = implementation if implementation in (None, "eager", EXACT) else "sdpa"
        unbuilt = uncomputed = ""
        for of_a_kind, narrow in SHRINKINGS:
            pair = None
            try:
                pair = _pair(shrunk(config, of_a_kind=of_a_kind, narrow=narrow), build, asked)
                return cls(*pair)
            except Exception as exc:  # a class of models may raise anything about a configuration
                why = " ".join(f"{type(exc).__name__}: {exc}".split())
                logger.debug("no probe of %s", type(config).__name__, exc_info=True)
                if pair is None:
                    unbuilt = why
                else:
                    name = type(pair[0]).__name__
                    uncomputed = f"{name} cannot be computed as config.json, with overrides, says: {why}"
        if uncomputed:
            raise NotComputed(uncomputed)
        raise NoProbe(f"no small model of its configuration can be computed ({unbuilt})")

    def alone(self, ids: torch.Tensor) -> torch.Tensor:
        """Logits [length, vocabulary] of the sequence [length], by the original, which remembers no earlier call."""
        Regimes(self.original).forget()
        found: torch.Tensor = self.original(input_ids=ids[None], use_cache=False).logits[0].float()
        return found

    def is_right(self, index: int, values: torch.Tensor, position: int | None = None) -> bool:
        """Whether `values` are the logits of the sequence of this index: of all its tokens, or of one."""
        right = self._right[index]
        expected = right if position is None else right[position]
        return bool((values.float() - expected).abs().max() <= TOLERANCE * right.std())

    def looks_ahead(self) -> str:
        """Describe a place where the logits of a token depend on later tokens; empty if there is none."""
        few = 3
        before, whole = self.alone(self.sequences[0][:few]), self._right[0]
        if (before - whole[:few]).abs().max() <= TOLERANCE * whole.std():
            return ""
        name = type(self.model).__name__
        return f"{name} also looks at the tokens behind one, which are not there when it is sampled"

    def changes_parameters(self) -> str:
        """Describe a parameter that the computation has changed; empty if none. RWKV rescales some for inference."""
        if all(map(torch.equal, self._weights, self.model.parameters())):
            return ""
        return f"{type(self.model).__name__} changes its parameters while it computes"

    def find(self, furthest: Way, shared: bool) -> Finding:
        name = type(self.model).__name__
        if problem := self.looks_ahead():
            return Finding(Way.NONE, problem)
        if self._differs(in_rows, [(index,) for index in range(len(LENGTHS))]):
            return self._not_further(Way.NONE, f"{name} computes something else in rows of one sequence")
        if self.changes_parameters():
            return Finding(Way.NONE, self.changes_parameters())
        if self._differs(in_rows, NEIGHBOURHOODS):
            return self._not_further(Way.ALONE, f"a sequence changes in {name} with those beside it")
        if furthest < Way.PACKED:
            return Finding(Way.ROWS)
        if remembers_tokens(self.model) or scales_by_column(self.model):
            return Finding(Way.ROWS, f"{name} mixes sequences that are in one row")
        if shared:
            self.model.set_attn_implementation(SHARED)
        else:
            attend_sequences_apart(self.model)
        if self._differs(packed, NEIGHBOURHOODS):
            return self._not_further(Way.ROWS, f"a sequence changes in {name} with its place in a row")
        return Finding(Way.PACKED)

    def _not_further(self, way: Way, why: str) -> Finding:
        return Finding(way, why + self._trouble, sure=not self._trouble)

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


def packed(model: Any, sequences: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    lengths = [len(sequence) for sequence in sequences]
    positions = torch.cat([torch.arange(length) for length in lengths])[None]
    given = row_inputs(model, torch.cat(list(sequences))[None], positions, lengths)
    return list(model(**given, use_cache=False).logits[0].split(lengths))
