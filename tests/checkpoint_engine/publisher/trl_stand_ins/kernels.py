"""In place of the package that downloads kernels: the one attention that TRL's trainer asks for, which runs on CUDA
devices alone, as plain arithmetic."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention


def get_kernel(name: str, **_: Any) -> SimpleNamespace:
    assert name == "kernels-community/flash-attn3", name
    return SimpleNamespace(flash_attn_varlen_func=flash_attn_varlen_func)


def flash_attn_varlen_func(
    queries: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    first_queries: torch.Tensor,
    first_keys: torch.Tensor,
    *_: int,
    softmax_scale: float | None,
    causal: bool,
    window_size: tuple[int, int],
) -> torch.Tensor:
    """(tokens, heads, head size) of several sequences after one another; the queries of each are its last tokens."""
    assert causal
    assert window_size == (-1, -1)
    answers = []
    for index in range(len(first_queries) - 1):
        here = slice(first_queries[index], first_queries[index + 1])
        there = slice(first_keys[index], first_keys[index + 1])
        query, key, value = (part.transpose(0, 1) for part in (queries[here], keys[there], values[there]))
        seen = torch.ones(query.shape[1], key.shape[1], dtype=torch.bool).tril(key.shape[1] - query.shape[1])
        answer = scaled_dot_product_attention(query, key, value, seen, scale=softmax_scale, enable_gqa=True)
        answers.append(answer.transpose(0, 1))
    return torch.cat(answers)
