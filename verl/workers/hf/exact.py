"""Attention that gives a token the same bits alone, in a batch, and behind a cache.

Every sum has one order: products over a head's width from the first, weights and values over keys from the first. Fused
attention chooses its order by the number of tokens, so that an engine, which decodes one of them, and a trainer, which
has all, get other numbers from the same weights.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch.nn.functional import linear, scaled_dot_product_attention
from transformers import AutoModelForCausalLM, PretrainedConfig

ROWS = (1, 2, 3, 4, 5, 7, 8, 16, 17, 33, 64)
Product = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
MOST_OUTPUTS = 16384
"""Outputs of a tested matrix: each output is a sum over inputs, independent of the others."""


def attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float) -> torch.Tensor:
    """Causal attention of the last T of S tokens: [T, H, d] of [T, H, d], [S, G, d] and [S, G, d], in their dtype."""
    # Imports llvmlite, of which vLLM stumbles over an object when it starts in the same process.
    from verl.workers.hf.exact_kernel import attend_in_order

    output = torch.empty(query.shape, dtype=torch.float32)
    attend_in_order(
        query.float().contiguous().numpy(),
        key.permute(1, 2, 0).float().contiguous().numpy(),
        value.transpose(0, 1).float().contiguous().numpy(),
        np.float32(scale),
        output.numpy(),
    )
    return output.to(query.dtype)


class _Sequences(torch.autograd.Function):
    """`attend` for sequences one after the other, with the gradients of torch's fused attention."""

    @staticmethod
    def forward(ctx: Any, query: Any, key: Any, value: Any, lengths: list[int], scale: float) -> torch.Tensor:
        ctx.save_for_backward(query, key, value)
        ctx.lengths, ctx.scale = lengths, scale
        states = [torch.split(each, lengths) for each in (query, key, value)]
        parts = zip(*states, strict=True)
        return torch.cat([attend(query, key, value, scale) for query, key, value in parts])

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        of_states: list[tuple[torch.Tensor, ...]] = []
        saved = [torch.split(each, ctx.lengths) for each in (*ctx.saved_tensors, gradients[0])]
        for query, key, value, gradient in zip(*saved, strict=True):
            with torch.enable_grad():
                states = [each.detach().requires_grad_() for each in (query, key, value)]
                query, key, value = (each.transpose(0, 1)[None] for each in states)
                out = scaled_dot_product_attention(query, key, value, is_causal=True, scale=ctx.scale, enable_gqa=True)
            of_states.append(torch.autograd.grad(out, states, gradient.transpose(0, 1)[None]))
        return *(torch.cat(parts) for parts in zip(*of_states, strict=True)), None, None


@torch.no_grad()
def layer_that_differs(config: PretrainedConfig, product: Product = linear) -> str:
    """Describe a matrix of a model of `config` whose bfloat16 product with a row depends, on this processor, on the
    number of rows. Empty if there is none, as exact mode requires."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)  # type: ignore[no-untyped-call]
    is_expert: dict[tuple[int, ...], bool] = {}
    for each in model.parameters():
        if each.dim() > 1:
            shape = tuple(each.shape[-2:])
            is_expert[shape] = is_expert.get(shape, False) or each.dim() > 2
    generator = torch.Generator().manual_seed(0)
    for (outputs, inputs), routed in is_expert.items():
        weight = torch.randn(min(outputs, MOST_OUTPUTS), inputs, generator=generator).bfloat16()
        rows = torch.randn(ROWS[-1], inputs, generator=generator).bfloat16()
        expected = product(rows, weight)
        for count in ROWS:
            given = rows[:count] if routed else beside_another(rows[:count])
            if not torch.equal(product(given, weight)[:count], expected[:count]):
                return f"a linear layer of {inputs} to {outputs} gives {count} rows other bits than {ROWS[-1]}"
    return ""


def beside_another(rows: torch.Tensor) -> torch.Tensor:
    """[n, ...] with at least two rows: kernels sum the products of a single row in another order."""
    return rows if len(rows) > 1 else rows.expand(2, *rows.shape[1:])


def attend_exactly(
    module: torch.nn.Module, query: Any, key: Any, value: Any, attention_mask: Any, *, scaling: float, **options: Any
) -> tuple[torch.Tensor, None]:
    """An attention implementation for transformers. Rows hold one sequence each, or those of `sequence_lengths`."""
    rows, _, columns, _ = query.shape
    lengths = options.get("sequence_lengths") or [columns] * rows
    states = [each.transpose(1, 2).flatten(0, 1) for each in (query, key, value)]
    output: torch.Tensor = _Sequences.apply(*states, list(lengths), scaling)  # type: ignore[no-untyped-call]
    return output.reshape(rows, columns, *output.shape[1:]), None


def no_mask(*args: Any, **options: Any) -> None:
    """No mask: padding follows a sequence, and causal attention does not see it."""
