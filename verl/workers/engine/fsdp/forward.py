"""From a micro-batch to what a model says about its responses: log-probs, or values."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from verl.protocol import DataProto, tensors_of
from verl.utils.torch_functional import entropy_from_logits, logprobs_from_logits
from verl.workers.engine.micro_batches import sequence_widths


def response_log_probs(
    model: nn.Module, micro_batch: DataProto, *, temperature: float, calculate_entropy: bool
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Log-probs of `responses` and entropies of their distributions at `temperature`: float32 [b, R], 0 on padding.

    On the model's device: `input_ids`, `attention_mask`, `position_ids` [b, P+R], `responses` [b, R].
    Columns that are padding in every row are not computed; logits exist only for the response.
    """
    batch = tensors_of(micro_batch)
    responses = batch["responses"]
    num_prompt = batch["input_ids"].shape[1] - responses.shape[1]
    left, right = _widths(micro_batch)
    # The logits at one position predict the next token.
    kept = torch.arange(left - 1, left + right - 1, device=responses.device)
    logits = model(**_inputs(batch, num_prompt, left, right), logits_to_keep=kept).logits
    if temperature != 1.0:
        logits = logits.float() / temperature
    padding = batch["attention_mask"][:, num_prompt : num_prompt + right] == 0
    rest = (0, responses.shape[1] - right)
    log_prob = logprobs_from_logits(logits, responses[:, :right])
    log_prob = functional.pad(log_prob.masked_fill(padding, 0.0), rest)
    if not calculate_entropy:
        return log_prob, None
    return log_prob, functional.pad(entropy_from_logits(logits).masked_fill(padding, 0.0), rest)


def response_values(model: nn.Module, micro_batch: DataProto) -> torch.Tensor:
    """What a value head expects of each response token's state, before the token: float32 [b, R], 0 on padding."""
    batch = tensors_of(micro_batch)
    responses = batch["responses"]
    num_prompt = batch["input_ids"].shape[1] - responses.shape[1]
    left, right = _widths(micro_batch)
    with warnings.catch_warnings():
        # A layer of one column returns a view of its product; FSDP2 asks that nothing be done to it in place.
        warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view")
        outputs = model(**_inputs(batch, num_prompt, left, right)).logits[:, left - 1 : left + right - 1, 0].float()
    padding = batch["attention_mask"][:, num_prompt : num_prompt + right] == 0
    return functional.pad(outputs.masked_fill(padding, 0.0), (0, responses.shape[1] - right))


def _widths(micro_batch: DataProto) -> tuple[int, int]:
    """Columns left and right of the border between prompt and response that are not padding in every row."""
    widths = sequence_widths(micro_batch)
    return max(1, *(left for left, _ in widths)), max(1, *(right for _, right in widths))


def _inputs(batch: Mapping[str, torch.Tensor], num_prompt: int, left: int, right: int) -> dict[str, Any]:
    columns = slice(num_prompt - left, num_prompt + right)
    names = ("input_ids", "attention_mask", "position_ids")
    return {name: batch[name][:, columns] for name in names} | {"use_cache": False}
