"""From a micro-batch to what a model says about its responses: log-probs, or values.

Rows are moved so that each begins in the first column, and padding follows it. What follows a token cannot change what
a causal model says about it, so no layer has to know about padding. Padding on the left is known to attention, and not
to most states, convolutions and biases that depend on distances.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from verl.protocol import DataProto, tensors_of
from verl.utils.torch_functional import entropy_from_logits, logprobs_from_logits


def response_log_probs(
    model: nn.Module, micro_batch: DataProto, *, temperature: float, calculate_entropy: bool
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Log-probs of `responses` and entropies of their distributions at `temperature`: float32 [b, R], 0 on padding.

    On the model's device: `input_ids`, `attention_mask`, `position_ids` [b, P+R], `responses` [b, R].
    Columns that are padding in every row are not computed; logits exist only for the response.
    """
    rows = _Rows.of(micro_batch)
    with _only_at(rows.predicting, model) as applied:
        logits = model(**rows.inputs, use_cache=False).logits
    if not applied:
        logits = _at(rows.predicting, logits)
    if temperature != 1.0:
        logits = logits.float() / temperature
    log_prob = rows.finished(logprobs_from_logits(logits, rows.responses))
    if not calculate_entropy:
        return log_prob, None
    return log_prob, rows.finished(entropy_from_logits(logits))


def response_values(model: nn.Module, micro_batch: DataProto) -> torch.Tensor:
    """What a value head expects of each response token's state, before the token: float32 [b, R], 0 on padding."""
    rows = _Rows.of(micro_batch)
    with warnings.catch_warnings():
        # A layer of one column returns a view of its product; FSDP2 asks that nothing be done to it in place.
        warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view")
        values = model(**rows.inputs, use_cache=False).logits
    return rows.finished(_at(rows.predicting, values)[..., 0].float())


@dataclass(frozen=True, slots=True, kw_only=True)
class _Rows:
    """A micro-batch whose rows begin in the first column, without the columns that are padding in all of them."""

    inputs: dict[str, Any]
    """What models are called with: [b, S]."""
    predicting: torch.Tensor
    """[b, r]: the column in `inputs` whose logits predict each token of a response."""
    responses: torch.Tensor
    """[b, r]"""
    padding: torch.Tensor
    """[b, r]: where there is no token."""
    num_response: int
    """R, which is at least r."""

    @classmethod
    def of(cls, micro_batch: DataProto) -> _Rows:
        batch = tensors_of(micro_batch)
        mask = batch["attention_mask"].bool()
        num_columns, num_response = mask.shape[1], batch["responses"].shape[1]
        num_prompt = num_columns - num_response
        columns = torch.arange(num_columns, device=mask.device)
        # A row has a token in front of its response, whatever the mask says: something has to predict the first one.
        first = torch.where(mask[:, :num_prompt], columns[:num_prompt], num_prompt - 1).amin(1)
        last = torch.where(mask, columns, num_prompt).amax(1)
        width = int((last + 1 - first).max())
        right = int((last + 1).max()) - num_prompt
        source = first[:, None] + columns[:width]
        inside = source < num_columns
        source = source.clamp(max=num_columns - 1)
        inputs = {name: batch[name].gather(1, source) for name in ("input_ids", "position_ids")}
        return cls(
            inputs=inputs | {"attention_mask": batch["attention_mask"].gather(1, source) * inside},
            # A row that is shorter than others has no columns for what it has no tokens for.
            predicting=(num_prompt - 1 - first[:, None] + columns[:right]).clamp(max=width - 1),
            responses=batch["responses"][:, :right],
            padding=~mask[:, num_prompt : num_prompt + right],
            num_response=num_response,
        )

    def finished(self, values: torch.Tensor) -> torch.Tensor:
        """[b, R] from [b, r]"""
        return functional.pad(values.masked_fill(self.padding, 0.0), (0, self.num_response - values.shape[1]))


@contextmanager
def _only_at(positions: torch.Tensor, model: nn.Module) -> Iterator[list[bool]]:
    """The model computes logits for `positions` [b, r] alone. What is yielded is empty if it went past its head."""
    applied: list[bool] = []

    def narrow(module: nn.Module, args: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        applied.append(True)
        return (_at(positions, args[0]), *args[1:])

    transformer: Any = model
    head = transformer.get_output_embeddings()
    handle = None if head is None else head.register_forward_pre_hook(narrow)
    try:
        yield applied
    finally:
        if handle is not None:
            handle.remove()


def _at(positions: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """[b, r, ...] from [b, S, ...]"""
    return values.gather(1, positions[..., None].expand(-1, -1, values.shape[-1]))
