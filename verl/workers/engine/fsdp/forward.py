"""Compute log-probs, or values, of the responses of a micro-batch.

Sequences share one row without padding (`pack`), or have a row each. Rows begin in the first column, and padding
follows: later tokens cannot change a causal model's output, so no layer needs to know about padding. Attention masks
padding on the left, but most states, convolutions and distance biases do not. Ranks may share a row of packed
sequences: each computes some of its tokens, and gets the outputs of all.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from verl.protocol import DataProto, tensors_of
from verl.utils.torch_functional import (
    candidate_logprobs_from_logits,
    entropy_from_logits,
    logprobs_from_logits,
)
from verl.workers.engine.base import CANDIDATE_LOG_PROBS, CANDIDATES
from verl.workers.hf.packing import row_inputs
from verl.workers.hf.seeing import Sight
from verl.workers.hf.sharers import Sharers

ALONE = Sharers()


def response_log_probs(
    model: nn.Module,
    micro_batch: DataProto,
    *,
    temperature: float,
    calculate_entropy: bool,
    pack: bool = False,
    sharers: Sharers = ALONE,
    sight: Sight | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Log-probs of `responses` and entropies of their distributions at `temperature`: float32 [b, R], 0 on padding.

    On the model's device: `input_ids`, `attention_mask`, `position_ids` [b, P+R], `responses` [b, R].
    Logits exist only for the tokens of responses. `sharers` all have the same micro-batch, and share its packed row.
    With `CANDIDATES` in `micro_batch` their log-probs are in it afterwards, too. `sight`: pictures of the sequences.
    """
    tokens = _Tokens.of(micro_batch, pack=pack, sharers=sharers)
    with _only_at(tokens, model) as applied, tokens.seen(model, sight) as inputs, _views_returned():
        logits = model(**inputs, use_cache=False).logits
    logits = logits[:, : len(tokens.rows)] if applied else tokens.predicting(logits)
    if temperature != 1.0:
        logits = logits.float() / temperature
    log_prob = tokens.finished(logprobs_from_logits(logits, tokens.responses))
    if tokens.candidates is not None:
        of_candidates = candidate_logprobs_from_logits(logits, tokens.candidates)
        tensors_of(micro_batch)[CANDIDATE_LOG_PROBS] = tokens.finished(of_candidates)
    if not calculate_entropy:
        return log_prob, None
    return log_prob, tokens.finished(entropy_from_logits(logits))


def response_values(
    model: nn.Module,
    micro_batch: DataProto,
    *,
    pack: bool = False,
    sharers: Sharers = ALONE,
    sight: Sight | None = None,
) -> torch.Tensor:
    """The value head's output for the state before each response token: float32 [b, R], 0 on padding. `sight`: as in
    `response_log_probs`."""
    tokens = _Tokens.of(micro_batch, pack=pack, sharers=sharers)
    with _views_returned(), tokens.seen(model, sight) as inputs:
        values = model(**inputs, use_cache=False).logits
    return tokens.finished(tokens.predicting(values)[..., 0].float())


@contextmanager
def _views_returned() -> Iterator[None]:
    """A layer of one column returns a view of its product, and InternVL features of pictures. FSDP2 asks that nothing
    be done to them in place."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view")
        yield


@dataclass(frozen=True, slots=True, kw_only=True)
class _Tokens:
    """The sequences of a micro-batch as a model gets them, and where in there the responses are."""

    input_ids: torch.Tensor
    """[rows, columns]: [1, all tokens] if packed, else [b, longest sequence]."""
    position_ids: torch.Tensor
    attention_mask: torch.Tensor | None
    """None if packed: the positions begin anew with each sequence."""
    lengths: list[int]
    """Of the packed sequences."""
    rows: torch.Tensor
    """[n], for each of the n tokens of responses: the row of the token in front of it, which predicts it,"""
    columns: torch.Tensor
    """and its column."""
    responses: torch.Tensor
    """[1, n]: the tokens themselves."""
    candidates: torch.Tensor | None
    """[1, n, K]: the `CANDIDATES` in the place of each of them."""
    is_response: torch.Tensor
    """[b, R]: where they belong."""
    sharers: Sharers
    total: int
    """Tokens of responses in the whole row, of which ranks that share it have parts;"""
    before: int = 0
    """and those that ranks before this one predict."""

    @classmethod
    def of(cls, micro_batch: DataProto, *, pack: bool, sharers: Sharers) -> _Tokens:
        batch = tensors_of(micro_batch)
        mask = batch["attention_mask"].bool()
        num_prompt = mask.shape[1] - batch["responses"].shape[1]
        columns = torch.arange(mask.shape[1], device=mask.device)
        # A row has a token in front of its response, whatever the mask says: something has to predict the first one.
        first = torch.where(mask[:, :num_prompt], columns[:num_prompt], num_prompt - 1).amin(1)
        lengths = torch.where(mask, columns + 1, num_prompt).amax(1) - first
        width = int(lengths.max())
        source = (first[:, None] + columns[:width]).clamp(max=mask.shape[1] - 1)
        inside = columns[:width] < lengths[:, None]
        input_ids, position_ids = (batch[name].gather(1, source) for name in ("input_ids", "position_ids"))
        is_response = mask[:, num_prompt:]
        rows, response_columns = is_response.nonzero(as_tuple=True)
        predicting = num_prompt - 1 - first[rows] + response_columns
        attention_mask = None
        if pack:
            starts = lengths.cumsum(0) - lengths
            rows, predicting = torch.zeros_like(rows), starts[rows] + predicting
            input_ids, position_ids = input_ids[inside][None], position_ids[inside][None]
        else:
            attention_mask = batch["attention_mask"].gather(1, source) * inside
            position_ids = position_ids * inside  # the longest position of a call may matter, and padding has none
        tokens = cls(
            input_ids=input_ids,
            position_ids=position_ids,
            attention_mask=attention_mask,
            lengths=lengths.tolist() if pack else [],
            rows=rows,
            columns=predicting,
            responses=batch["responses"][is_response][None],
            candidates=batch[CANDIDATES][is_response][None].long() if CANDIDATES in batch else None,
            is_response=is_response,
            sharers=sharers,
            total=len(rows),
        )
        return tokens if sharers.size == 1 else tokens._own()

    def _own(self) -> _Tokens:
        """Those of this rank. The row is filled up to as many for each with a sequence that nobody asks about."""
        missing = -self.input_ids.shape[1] % self.sharers.size
        input_ids = self.sharers.own(torch.nn.functional.pad(self.input_ids, (0, missing)))
        filling = torch.arange(missing, device=input_ids.device)[None]
        start, stop = (input_ids.shape[1] * (self.sharers.rank + end) for end in (0, 1))
        is_own = (self.columns >= start) & (self.columns < stop)
        return replace(
            self,
            input_ids=input_ids,
            position_ids=self.sharers.own(torch.cat([self.position_ids, filling], dim=1)),
            lengths=[*self.lengths, *[missing] * (missing > 0)],
            rows=self.rows[is_own],
            columns=self.columns[is_own] - start,
            responses=self.responses[:, is_own],
            candidates=None if self.candidates is None else self.candidates[:, is_own],
            before=int((self.columns < start).sum()),
        )

    def inputs(self, model: nn.Module) -> dict[str, Any]:
        """What `model` is called with."""
        if self.attention_mask is not None:
            given = {"input_ids": self.input_ids, "position_ids": self.position_ids}
            return given | {"attention_mask": self.attention_mask}
        return row_inputs(model, self.input_ids, self.position_ids, self.lengths, self.sharers)

    @contextmanager
    def seen(self, model: nn.Module, sight: Sight | None) -> Iterator[dict[str, Any]]:
        """What `model` is called with in this block, pictures with it."""
        if sight is None:
            yield self.inputs(model)
            return
        with_blank, rows, mask = sight.with_blank(*self._in_rows())
        seen = with_blank.of(model, rows, mask)
        if self.attention_mask is None:
            seen = seen.packed(model)
        with seen.embedded(model):
            yield seen.inputs

    def _in_rows(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Ids with a row for each sequence, and which of them are there: [b, longest sequence]."""
        if self.attention_mask is not None:
            return self.input_ids, self.attention_mask
        rows = nn.utils.rnn.pad_sequence(list(torch.split(self.input_ids[0], self.lengths)), batch_first=True)
        lengths = torch.tensor(self.lengths, device=rows.device)
        return rows, (torch.arange(rows.shape[1], device=rows.device) < lengths[:, None]).long()

    def predicting(self, values: torch.Tensor) -> torch.Tensor:
        """[1, n, ...] from [rows, columns, ...]: what is in front of each token of a response."""
        return values[self.rows, self.columns][None]

    def finished(self, values: torch.Tensor) -> torch.Tensor:
        """[b, R, ...] from [1, n, ...], of all ranks that share the row."""
        values = self.sharers.joined(values[0], self.before, self.total)
        places = self.is_response.reshape(*self.is_response.shape, *[1] * (values.ndim - 1))
        zeros = values.new_zeros(*self.is_response.shape, *values.shape[1:])
        return zeros.masked_scatter(places.expand_as(zeros), values)


@contextmanager
def _only_at(tokens: _Tokens, model: nn.Module) -> Iterator[list[bool]]:
    """The model computes logits for what predicts responses. What is yielded is empty if it went past its head."""
    applied: list[bool] = []

    def narrow(module: nn.Module, args: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        applied.append(True)
        return (tokens.predicting(args[0]), *args[1:])

    transformer: Any = model
    head = transformer.get_output_embeddings()
    handle = None if head is None else head.register_forward_pre_hook(narrow)
    try:
        yield applied
    finally:
        if handle is not None:
            handle.remove()
