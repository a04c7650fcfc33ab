"""From a micro-batch to the log-probs of its responses."""

from __future__ import annotations

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
    widths = sequence_widths(micro_batch)
    left = max(1, *(left for left, _ in widths))
    right = max(1, *(right for _, right in widths))
    columns = slice(num_prompt - left, num_prompt + right)
    logits = model(
        input_ids=batch["input_ids"][:, columns],
        attention_mask=batch["attention_mask"][:, columns],
        position_ids=batch["position_ids"][:, columns],
        use_cache=False,
        # The logits at one position predict the next token.
        logits_to_keep=torch.arange(left - 1, left + right - 1, device=responses.device),
    ).logits
    if temperature != 1.0:
        logits = logits.float() / temperature
    padding = batch["attention_mask"][:, num_prompt : num_prompt + right] == 0
    rest = (0, responses.shape[1] - right)
    log_prob = logprobs_from_logits(logits, responses[:, :right])
    log_prob = functional.pad(log_prob.masked_fill(padding, 0.0), rest)
    if not calculate_entropy:
        return log_prob, None
    return log_prob, functional.pad(entropy_from_logits(logits).masked_fill(padding, 0.0), rest)
