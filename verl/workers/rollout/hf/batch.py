"""Decode sequences together, one token per step: with transformers' cache, or from whole sequences if it is wrong."""

from __future__ import annotations

import inspect
from collections.abc import Hashable, Iterator, Sequence
from enum import IntEnum
from typing import Any

import numpy as np
import torch
from transformers import DynamicCache, PreTrainedModel

from verl.workers.hf.probing import in_rows
from verl.workers.hf.regimes import Regimes
from verl.workers.hf.seeing import Sight, as_text
from verl.workers.rollout.hf.routes import RouteWatch

CACHES = ("past_key_values", "cache_params")
"""Models' names of the argument for the cache: keys and values, or states."""


class Decoding(IntEnum):
    """How the next token is computed. A model that supports one way supports all earlier ones."""

    ALONE = 0
    """From the whole sequence, one after the other."""
    ROWS = 1
    """From whole sequences, in rows of their own."""
    CACHED = 2
    """From the last token of each, and a cache of the tokens before it."""


class DecodeBatch:
    """Sequences that grow by a token at a time. Used from one thread at a time."""

    def __init__(
        self, model: PreTrainedModel, watch: RouteWatch | None = None, decoding: Decoding = Decoding.CACHED
    ) -> None:
        self._model: Any = model
        self._watch = watch
        self._decoding = decoding
        self._regimes = Regimes(model)
        self._takes_cache_as = cache_name(model)
        self.routes: list[np.ndarray] = []
        """Of the tokens of each sequence that the last step read, where they are watched."""
        self._cache: DynamicCache | None = None
        self._mask = torch.empty(0)
        self._deltas = torch.empty(0)
        """[sequences, 1]: how much further, or less far, than the tokens before it a next token's position is."""

    def forget(self) -> None:
        """Drop the cache; the next step computes it again. After the weights or the set of sequences changed."""
        self._cache = None

    @torch.inference_mode()
    def next_logits(self, sequences: Sequence[Sequence[int]], sight: Sight | None = None) -> torch.Tensor:
        """Logits [sequences, vocabulary] of the token after each sequence.

        Between two calls without `forget` or `keep`, every sequence has grown by one token. `sight`: their pictures.
        """
        if self._decoding is Decoding.CACHED:
            return self._with_cache(sequences, sight)
        assert sight is None  # the driver has asked how they are decoded
        return self._anew(sequences)

    def _with_cache(self, sequences: Sequence[Sequence[int]], sight: Sight | None) -> torch.Tensor:
        """Rows end in the last column."""
        if self._cache is None:
            self._cache = DynamicCache(config=self._model.config)
            width = max(len(sequence) for sequence in sequences)
            input_ids = torch.tensor([[0] * (width - len(sequence)) + list(sequence) for sequence in sequences])
            self._mask = torch.tensor([[0] * (width - len(sequence)) + [1] * len(sequence) for sequence in sequences])
            self._deltas = torch.zeros(len(sequences), 1, dtype=torch.long)
            if sight is not None:
                return self._seen(sight, input_ids)
        else:
            input_ids = torch.tensor([[sequence[-1]] for sequence in sequences])
            self._mask = torch.cat([self._mask, torch.ones(len(sequences), 1, dtype=self._mask.dtype)], dim=1)
        positions = (self._mask.cumsum(-1) - 1).clamp(min=0)[:, -input_ids.shape[1] :] + self._deltas
        device = self._model.device
        with as_text(self._model, input_ids.to(device)) as plain:
            logits = self._last_logits(
                {
                    "input_ids": plain,
                    "attention_mask": self._mask.to(device),
                    "position_ids": positions.to(device),
                }
            )
        if self._watch is not None:
            self.routes = self._watch.take(self._mask[:, -input_ids.shape[1] :])
        return logits

    def _seen(self, sight: Sight, input_ids: torch.Tensor) -> torch.Tensor:
        device = self._model.device
        seen = sight.of(self._model, input_ids.to(device), self._mask.to(device))
        self._deltas = seen.deltas.cpu()
        with seen.embedded(self._model):
            return self._last_logits(seen.inputs)

    def _last_logits(self, given: dict[str, Any]) -> torch.Tensor:
        assert self._takes_cache_as is not None
        output = self._model(**given, **{self._takes_cache_as: self._cache}, use_cache=True, logits_to_keep=1)
        logits: torch.Tensor = output.logits[:, -1]
        return logits

    def _anew(self, sequences: Sequence[Sequence[int]]) -> torch.Tensor:
        """Rows begin in the first column, as a trainer's do."""
        logits: dict[int, torch.Tensor] = {}
        routes: dict[int, np.ndarray] = {}
        for together in self._groups(sequences):
            rows = [torch.tensor(sequences[index], device=self._model.device) for index in together]
            self._regimes.forget()
            found = in_rows(self._model, rows)
            logits |= {index: values[-1] for index, values in zip(together, found, strict=True)}
            if self._watch is not None:
                mask = torch.nn.utils.rnn.pad_sequence([torch.ones_like(row) for row in rows], batch_first=True)
                routes |= dict(zip(together, self._watch.take(mask.cpu()), strict=True))
        self.routes = [routes[index] for index in sorted(routes)]
        return torch.stack([logits[index] for index in range(len(sequences))])

    def _groups(self, sequences: Sequence[Sequence[int]]) -> Iterator[list[int]]:
        """Indices of those that may share a call."""
        groups: dict[Hashable, list[int]] = {}
        for index, sequence in enumerate(sequences):
            alone = self._decoding is Decoding.ALONE
            groups.setdefault(index if alone else self._regimes.of(len(sequence)), []).append(index)
        yield from groups.values()

    def keep(self, rows: Sequence[int]) -> None:
        """Continue with these rows only."""
        if self._cache is not None:
            index: Any = torch.tensor(rows)
            self._mask, self._deltas = self._mask[index], self._deltas[index]
            self._cache.reorder_cache(index.to(self._model.device))  # states know no other selection of rows


def cache_name(model: PreTrainedModel) -> str | None:
    """The parameter of `model` for a cache; None if it has none, or returns it under another name."""
    parameters = inspect.signature(model.forward).parameters
    return next((name for name in CACHES if name in parameters), None)
