"""Sequences that are decoded together, one token per step, with transformers' KV cache."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from transformers import DynamicCache, PreTrainedModel

from verl.workers.rollout.hf.routes import RouteWatch


class DecodeBatch:
    """Left-padded sequences and their KV cache. Used from one thread at a time."""

    def __init__(self, model: PreTrainedModel, watch: RouteWatch | None = None) -> None:
        self._model = model
        self._watch = watch
        self.routes: list[np.ndarray] = []
        """Of the tokens of each sequence that the last step read, where they are watched."""
        self._cache: DynamicCache | None = None
        self._mask = torch.empty(0)

    def forget(self) -> None:
        """Drop the cache; the next step computes it again. After the weights or the set of sequences changed."""
        self._cache = None

    @torch.inference_mode()
    def next_logits(self, sequences: Sequence[Sequence[int]]) -> torch.Tensor:
        """Logits [sequences, vocabulary] of the token after each sequence.

        Between two calls without `forget` or `keep`, every sequence has grown by one token.
        """
        if self._cache is None:
            self._cache = DynamicCache(config=self._model.config)
            width = max(len(sequence) for sequence in sequences)
            input_ids = torch.tensor([[0] * (width - len(sequence)) + list(sequence) for sequence in sequences])
            self._mask = torch.tensor([[0] * (width - len(sequence)) + [1] * len(sequence) for sequence in sequences])
        else:
            input_ids = torch.tensor([[sequence[-1]] for sequence in sequences])
            self._mask = torch.cat([self._mask, torch.ones(len(sequences), 1, dtype=self._mask.dtype)], dim=1)
        positions = (self._mask.cumsum(-1) - 1).clamp(min=0)[:, -input_ids.shape[1] :]
        device = self._model.device
        output = self._model(
            input_ids=input_ids.to(device),
            attention_mask=self._mask.to(device),
            position_ids=positions.to(device),
            past_key_values=self._cache,
            use_cache=True,
            logits_to_keep=1,
        )
        if self._watch is not None:
            self.routes = self._watch.take(self._mask[:, -input_ids.shape[1] :])
        logits: torch.Tensor = output.logits[:, -1]
        return logits

    def keep(self, rows: Sequence[int]) -> None:
        """Go on with these rows only."""
        if self._cache is not None:
            index = torch.tensor(rows)
            self._mask = self._mask[index]
            self._cache.batch_select_indices(index.to(self._model.device))
