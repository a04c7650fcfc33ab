"""Compute log-probs and entropies of a micro-batch's responses, over a vocabulary that ranks share, or values."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist

from verl.protocol import DataProto, tensors_of
from verl.workers.engine.megatron.library import parallel_state, reduce_from_tensor_model_parallel_region

UNLIKELY = -1e30
"""A finite score whose exponential is 0: 0 times infinity is not 0."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedBatch:
    """A micro-batch whose sequences begin in column 0.

    Megatron counts positions by column, which are then right. No token precedes padding at the end, so a causal mask is
    enough.
    """

    input_ids: torch.Tensor
    """[b, s]"""
    attention_mask: torch.Tensor
    """[1, 1, s, s], true where attention is forbidden."""
    source: torch.Tensor
    """[b, R]: the column whose logits predict each token of the response; 0 on padding."""
    padding: torch.Tensor
    """[b, R]"""
    columns: torch.Tensor
    """[b, s]: the original column of a token; -1 on padding."""
    num_columns: int
    """P+R, the original number of columns."""

    @classmethod
    def of(cls, micro_batch: DataProto, *, multiple: int = 1) -> PackedBatch:
        """`multiple`: a divisor that the number of columns must have."""
        batch = tensors_of(micro_batch)
        mask = batch["attention_mask"].bool()
        num_response = batch["responses"].shape[1]
        width = max(2, int(mask.sum(1).max()))
        width = -(-width // multiple) * multiple
        order = torch.argsort(mask, dim=1, descending=True, stable=True)
        packed = torch.gather(batch["input_ids"].masked_fill(~mask, 0), 1, order)
        columns = order.masked_fill(~torch.gather(mask, 1, order), -1)
        if (missing := width - packed.shape[1]) > 0:
            packed = torch.nn.functional.pad(packed, (0, missing))
            columns = torch.nn.functional.pad(columns, (0, missing), value=-1)
        ahead = torch.ones(width, width, dtype=torch.bool, device=mask.device).triu(1)
        padding = ~mask[:, -num_response:]
        source = (mask.cumsum(1)[:, -num_response:] - 2).clamp(min=0).masked_fill(padding, 0)
        return cls(
            input_ids=packed[:, :width],
            attention_mask=ahead[None, None],
            source=source,
            padding=padding,
            columns=columns[:, :width],
            num_columns=mask.shape[1],
        )


def response_values(outputs: torch.Tensor, packed: PackedBatch) -> torch.Tensor:
    """Values before each response token, float32 [b, R], from a value head's outputs [b, s, 1]; 0 on padding."""
    return torch.gather(outputs[..., 0], 1, packed.source).float().masked_fill(packed.padding, 0.0)


def response_log_probs(
    logits: torch.Tensor, packed: PackedBatch, responses: torch.Tensor, *, temperature: float, vocab: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probs and entropies, float32 [b, R], from this rank's columns [b, s, v] of the logits; 0 on padding.

    Equal on all tensor-parallel ranks; gradients reach every rank's logits. Columns from `vocab` on stand for no token.
    A collective of the tensor-parallel ranks.
    """
    index = packed.source.unsqueeze(-1).expand(-1, -1, logits.shape[-1])
    scores = torch.gather(logits, 1, index).float() / temperature
    first = parallel_state.get_tensor_model_parallel_rank() * scores.shape[-1]
    if (own := vocab - first) < scores.shape[-1]:
        unused = torch.arange(scores.shape[-1], device=scores.device) >= own
        scores = scores.masked_fill(unused, UNLIKELY)
    largest = scores.detach().amax(-1)
    dist.all_reduce(largest, dist.ReduceOp.MAX, group=parallel_state.get_tensor_model_parallel_group())
    scores = scores - largest.unsqueeze(-1)
    exponentials = scores.exp()
    labels = responses - first
    is_own = (labels >= 0) & (labels < scores.shape[-1])
    label_scores = torch.gather(scores, -1, labels.clamp(0, scores.shape[-1] - 1).unsqueeze(-1)).squeeze(-1)
    sums = torch.stack([exponentials.sum(-1), (exponentials * scores).sum(-1), label_scores.masked_fill(~is_own, 0.0)])
    total, weighted, of_label = reduce_from_tensor_model_parallel_region(sums).unbind(0)
    log_total = total.log()
    log_probs = (of_label - log_total).masked_fill(packed.padding, 0.0)
    return log_probs, (log_total - weighted / total).masked_fill(packed.padding, 0.0)
