"""Attention that gives a token the same bits alone, in a batch, and behind a cache.

Every sum has one order: products over a head's width from the first, weights and values over keys from the first. Fused
attention chooses its order by the number of tokens, so that an engine, which decodes one of them, and a trainer, which
has all, get other numbers from the same weights.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from itertools import accumulate, groupby
from typing import Any, cast

import numpy as np
import torch
from torch.nn.functional import linear, pad, scaled_dot_product_attention
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from verl.compat.transformers import gated
from verl.utils.config import ConfigError
from verl.utils.model import EXACT, expert_count

ROWS = (1, 2, 3, 4, 5, 7, 8, 16, 17, 33, 64)
Product = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
FEWEST_PRODUCTS = 16**3
"""torch multiplies matrices with loops of its own, and not with oneDNN, where there are no more of them."""
BITS = {torch.bfloat16: torch.uint16, torch.float32: torch.uint32}
MOST_OUTPUTS = 16384
"""Outputs of a tested matrix: each output is a sum over inputs, independent of the others."""


def attend(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float, lengths: Sequence[int] = ()
) -> torch.Tensor:
    """Causal attention of T tokens of S: [T, H, d] of [T, H, d], [S, G, d] and [S, G, d], in their dtype.

    The T tokens are the last ones of one sequence. With `lengths` of several, T = S.
    """
    pages = torch.stack([torch.arange(len(key)), torch.zeros(len(key), dtype=torch.long)], dim=1)
    query_ends, key_ends = ([*accumulate(lengths)] or [len(states)] for states in (query, key))
    return attend_in_pages(query, key[:, None], value[:, None], scale, pages, query_ends, key_ends)


def attend_in_pages(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    scale: float,
    pages: torch.Tensor,
    query_ends: Sequence[int],
    key_ends: Sequence[int],
) -> torch.Tensor:
    """As `attend`, for the last tokens of several sequences, with keys and values in pages.

    Args:
        query: [T, H, d], of one sequence after the other.
        key: [pages, tokens of a page, G, d].
        value: The same.
        scale: What products of queries and keys are multiplied with.
        pages: [S, 2], int64: the page and the place in it of each token, of one sequence after the other.
        query_ends: Where each sequence ends in `query`.
        key_ends: And in `pages`.

    Returns:
        [T, H, d], in the dtype of the query.
    """
    # Imports llvmlite, of which vLLM stumbles over an object when it starts in the same process.
    from verl.workers.hf.exact_kernel import attend_in_order

    output = torch.empty(query.shape, dtype=torch.float32)
    attend_in_order(
        query.detach().float().contiguous().numpy(),
        *(states.detach().view(BITS[states.dtype]).numpy() for states in (key, value)),
        pages.numpy(),
        np.array(query_ends, np.int64),
        np.array(key_ends, np.int64),
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
        return attend(query, key, value, scale, lengths)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        tokens = torch.split(torch.arange(sum(ctx.lengths)), ctx.lengths)
        found = [torch.empty_like(states) for states in ctx.saved_tensors]
        for _, alike in groupby(sorted(tokens, key=len), lambda each: len(each).bit_length()):
            _add_gradients(pad_sequence(list(alike), batch_first=True, padding_value=-1), ctx, gradients[0], found)
        return *found, None, None


def _add_gradients(rows: torch.Tensor, ctx: Any, gradient: torch.Tensor, found: list[torch.Tensor]) -> None:
    """Of sequences of similar lengths at once: `rows` are places of their tokens, [sequences, longest], -1 where there
    is none. Those come last, so that no token sees them; their gradient is zero."""
    there = rows >= 0
    with torch.enable_grad():
        states = [each[rows].detach().requires_grad_() for each in ctx.saved_tensors]
        query, key, value = (each.transpose(1, 2) for each in states)
        out = scaled_dot_product_attention(query, key, value, is_causal=True, scale=ctx.scale, enable_gqa=True)
    received = gradient[rows] * there[..., None, None]
    for each, own in zip(found, torch.autograd.grad(out, states, received.transpose(1, 2)), strict=True):
        each[rows[there]] = own[there]


def agree(model: PreTrainedModel) -> None:
    """Make linear layers, routers and experts of `model` give a row the same bits beside any others, in place.

    What experts add to a token is summed in the order of the experts, in the dtype of the token.
    """
    if expert_count(model.config):
        model.set_experts_implementation(EXACT)
    for module in model.modules():
        is_router = hasattr(module, "top_k") and isinstance(getattr(module, "weight", None), torch.Tensor)
        if isinstance(module, torch.nn.Linear) or is_router:
            fewest = fewest_rows(cast(torch.Tensor, module.weight).shape)
            module.forward = functools.partial(_beside_others, module.forward, fewest)


def fewest_rows(shape: torch.Size) -> int:
    """The number of rows from which on a product with a weight of `shape`, [outputs, inputs], has one kernel."""
    return max(2, FEWEST_PRODUCTS // shape.numel() + 1)  # of a single row there is another order


def _beside_others(forward: Callable[[torch.Tensor], Any], fewest: int, states: torch.Tensor) -> Any:
    """`forward(states)` of `states`, [..., inputs], with rows of zeros beside them if they are fewer than `fewest`.

    `forward` returns a tensor, or a tuple of tensors, with a row for each row of `states`."""
    rows = states.flatten(0, -2)
    if (missing := fewest - len(rows)) <= 0:
        return forward(states)
    found = forward(pad(rows, (0, 0, 0, missing)))
    if isinstance(found, tuple):
        return tuple(each[: len(rows)] for each in found)
    return found[: len(rows)].unflatten(0, states.shape[:-1])


def product(rows: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """[n, outputs] from [n, inputs] and [outputs, inputs]: a row has the same bits for any n."""
    found: torch.Tensor = _beside_others(lambda given: linear(given, weight), fewest_rows(weight.shape), rows)
    return found


def experts_in_order(
    module: Any, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
) -> torch.Tensor:
    """For transformers: [tokens, width] from states of that shape and each token's experts and weights, [tokens, k]."""
    output = torch.zeros_like(hidden_states)
    for expert in sorted(set(top_k_index.flatten().tolist())):
        tokens, places = torch.where(top_k_index == expert)
        states = product(hidden_states[tokens], module.gate_up_proj[expert])
        states = product(gated(module, states), module.down_proj[expert])
        output = output.index_add(0, tokens, states * top_k_weights[tokens, places, None])
    return output


@torch.no_grad()
def layer_that_differs(config: PretrainedConfig, product: Product = product) -> str:
    """Describe a matrix of a model of `config` whose bfloat16 product with a row depends, on this processor, on the
    number of rows. Empty if there is none, as exact mode requires."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)  # type: ignore[no-untyped-call]
    generator = torch.Generator().manual_seed(0)
    for outputs, inputs in dict.fromkeys(tuple(each.shape[-2:]) for each in model.parameters() if each.dim() > 1):
        weight, rows = cancelling((min(outputs, MOST_OUTPUTS), inputs), ROWS[-1], generator)
        expected = product(rows, weight)
        for count in ROWS:
            if not torch.equal(product(rows[:count], weight), expected[:count]):
                return f"a linear layer of {inputs} to {outputs} gives {count} rows other bits than {ROWS[-1]}"
    return ""


def cancelling(shape: tuple[int, int], count: int, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    """A weight of `shape`, [outputs, inputs], and rows, [count, inputs], in bfloat16, whose products sum to zero.

    What is left of a sum is what was rounded on the way, which shows its order."""
    outputs, inputs = shape
    order = torch.randperm(inputs, generator=generator)
    weight, rows = (torch.randn(n, -(-inputs // 2), generator=generator) for n in (outputs, count))
    whole = (torch.cat([weight, weight], dim=1), torch.cat([rows, -rows], dim=1))
    first, second = (each[:, :inputs][:, order].bfloat16() for each in whole)
    return first, second


def attend_exactly(
    module: torch.nn.Module, query: Any, key: Any, value: Any, attention_mask: Any, *, scaling: float, **options: Any
) -> tuple[torch.Tensor, None]:
    """An attention implementation for transformers. Rows hold one sequence each, or those of `sequence_lengths`.

    Raises ConfigError for a layer that does not attend to all tokens before.
    """
    if options.get("sliding_window"):
        raise ConfigError(f"exact mode attends to all tokens before, not to {options['sliding_window']} of them")
    rows, _, columns, _ = query.shape
    lengths = options.get("sequence_lengths") or [columns] * rows
    states = [each.transpose(1, 2).flatten(0, 1) for each in (query, key, value)]
    output: torch.Tensor = _Sequences.apply(*states, list(lengths), scaling)  # type: ignore[no-untyped-call]
    return output.reshape(rows, columns, *output.shape[1:]), None


def no_mask(*args: Any, **options: Any) -> None:
    """No mask: padding follows a sequence, and causal attention does not see it."""


ALL_EXPERTS_FUNCTIONS.register(EXACT, experts_in_order)
