"""Masked statistics, and log-probabilities and entropy of logits in bounded extra memory."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.nn.functional import cross_entropy
from torch.utils.checkpoint import checkpoint

CHUNK_NUMEL = 1 << 24
"""Logits per chunk: 64 MiB of float32 per temporary. Much smaller ones fragment malloc's heap: a quarter of this size
used three times the memory in the end."""


def masked_sum(values: torch.Tensor, mask: torch.Tensor, axis: int | tuple[int, ...] | None = None) -> torch.Tensor:
    """Sum of `values`, each weighted by `mask`. Ignores values, even NaN, where the mask is zero."""
    kept = torch.where(mask.bool(), values, 0.0)
    kept = kept if mask.dtype is torch.bool else kept * mask
    return kept.sum() if axis is None else kept.sum(axis)


def masked_mean(values: torch.Tensor, mask: torch.Tensor, axis: int | tuple[int, ...] | None = None) -> torch.Tensor:
    """Mean of `values`, each weighted by `mask`; 0 where all weights are zero."""
    total = mask.sum() if axis is None else mask.sum(axis)
    return masked_sum(values, mask, axis) / torch.where(total == 0, 1, total)


def masked_var(values: torch.Tensor, mask: torch.Tensor, unbiased: bool = True) -> torch.Tensor:
    """Variance of `values`, each weighted by `mask`; if `unbiased`, times n / (n - 1) where weights sum to n > 1."""
    total = mask.sum()
    variance = masked_mean((values - masked_mean(values, mask)) ** 2, mask)
    return torch.where(total > 1, variance * total / (total - 1), variance) if unbiased else variance


def masked_whiten(values: torch.Tensor, mask: torch.Tensor, shift_mean: bool = True) -> torch.Tensor:
    """`values` scaled to variance 1, and to mean 0 unless `shift_mean=False`, over the mask; 0 elsewhere."""
    mean = masked_mean(values, mask)
    whitened = (values - mean) * torch.rsqrt(masked_var(values, mask) + 1e-8)
    return torch.where(mask.bool(), whitened if shift_mean else whitened + mean, 0.0)


def logprobs_from_logits(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Log-probability of each label: logits [..., V], labels [...] -> float32 [...].

    Computed in float32 a few rows at a time, and again in the backward pass, so that no second copy of the logits is
    kept between the two. Labels must be in [0, V), also on padding.
    """
    return _by_rows(_row_logprobs, logits, labels)


def entropy_from_logits(logits: torch.Tensor) -> torch.Tensor:
    """Entropy in nats of each distribution: logits [..., V] -> float32 [...]. Memory as in `logprobs_from_logits`."""
    return _by_rows(_row_entropy, logits)


def candidate_logprobs_from_logits(logits: torch.Tensor, candidates: torch.Tensor) -> torch.Tensor:
    """Log-probabilities of several tokens per position: logits [..., V], candidates [..., K] -> float32 [..., K]."""
    return logits.gather(-1, candidates).float() - _by_rows(_row_logsumexp, logits)[..., None]


def _row_logsumexp(logits: torch.Tensor) -> torch.Tensor:
    return logits.float().logsumexp(-1)


def _row_logprobs(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return -cross_entropy(logits.float(), labels, reduction="none")


def _row_entropy(logits: torch.Tensor) -> torch.Tensor:
    log_probs = logits.float().log_softmax(-1)
    # A token that sampling excludes has logit -inf and contributes nothing; 0 * -inf would be NaN.
    return -(log_probs.exp() * log_probs.clamp(min=torch.finfo(torch.float32).min)).sum(-1)


def _by_rows(function: Callable[..., torch.Tensor], logits: torch.Tensor, *per_row: torch.Tensor) -> torch.Tensor:
    """`function` over rows in chunks of at most CHUNK_NUMEL logits."""
    num_rows, width = logits[..., 0].numel(), logits.shape[-1]
    rows = (logits.reshape(num_rows, width), *(tensor.reshape(num_rows) for tensor in per_row))
    chunk = max(1, CHUNK_NUMEL // width)
    if num_rows <= chunk:
        return function(*rows).reshape(logits.shape[:-1])
    recompute = torch.is_grad_enabled() and logits.requires_grad

    def run(*part: torch.Tensor) -> torch.Tensor:
        return checkpoint(function, *part, use_reentrant=False) if recompute else function(*part)

    # One split, not many slices: the backward pass of a slice fills a tensor as large as all of the logits.
    parts = zip(*(torch.split(tensor, chunk) for tensor in rows), strict=True)
    return torch.cat([run(*part) for part in parts]).reshape(logits.shape[:-1])
