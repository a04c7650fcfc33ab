"""That a token gets the same bits alone, in a batch, packed and behind a cache. What an engine adds: tests/e2e."""

from __future__ import annotations

from itertools import accumulate

import pytest
import torch
from torch.nn.functional import linear, scaled_dot_product_attention
from transformers import AutoModelForCausalLM, Qwen2Config, Qwen3MoeConfig

from verl.protocol import DataProto
from verl.utils.config import ConfigError
from verl.utils.model import EXACT
from verl.workers.engine.fsdp.forward import response_log_probs
from verl.workers.hf.exact import (
    agree,
    attend,
    attend_exactly,
    attend_in_pages,
    cancelling,
    layer_that_differs,
    product,
)

CONFIG = Qwen2Config(
    vocab_size=97,
    hidden_size=64,
    intermediate_size=176,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    initializer_range=0.2,
)
EXPERTS = Qwen3MoeConfig(
    **{
        name: getattr(CONFIG, name)
        for name in ("vocab_size", "hidden_size", "num_attention_heads", "initializer_range")
    },
    num_hidden_layers=2,
    num_key_value_heads=2,
    head_dim=16,
    moe_intermediate_size=48,
    num_experts=8,
    num_experts_per_tok=2,
)
LENGTHS = (5, 40, 17, 2)
PROMPT = 3
"""Tokens at most, of rows with a response each."""


def depends_on_rows() -> bool:
    """Whether this processor sums even large products of several rows in one order or another."""
    weight, rows = cancelling((256, 64), 64, torch.Generator().manual_seed(0))
    return not all(torch.equal(linear(rows[:count], weight), linear(rows, weight)[:count]) for count in (2, 7, 33))


needs_same_rows = pytest.mark.skipif(depends_on_rows(), reason="this processor sums bfloat16 by the number of rows")


def states(tokens: int, dtype: torch.dtype = torch.bfloat16) -> list[torch.Tensor]:
    """Queries of 4 heads, keys and values of 2."""
    generator = torch.Generator().manual_seed(tokens)
    return [torch.randn(tokens, heads, 16, generator=generator).to(dtype) for heads in (4, 2, 2)]


def fused(query, key, value, scale):
    heads = [each.transpose(0, 1)[None] for each in (query, key, value)]
    found = scaled_dot_product_attention(*heads, is_causal=True, scale=scale, enable_gqa=True)
    return found[0].transpose(0, 1)


def test_attention_is_that_of_torch():
    query, key, value = states(50, torch.float32)
    torch.testing.assert_close(attend(query, key, value, 0.3), fused(query, key, value, 0.3))


@pytest.mark.parametrize("chunk", [1, 7, 49])
def test_tokens_behind_a_cache_get_the_bits_of_a_whole_sequence(chunk):
    query, key, value = states(50)
    whole = attend(query, key, value, 0.25)
    for start in range(0, 50, chunk):
        stop = min(start + chunk, 50)
        assert torch.equal(attend(query[start:stop], key[:stop], value[:stop], 0.25), whole[start:stop])


def test_sequences_whose_keys_are_in_shuffled_pages_get_the_bits_that_each_has_alone():
    alone = [states(length) for length in LENGTHS]
    new = [1, 7, 17, 2]
    size = 4
    pages = torch.randperm(40, generator=torch.Generator().manual_seed(2)).tolist()
    cache = torch.full((40, size, 2, 32), torch.nan, dtype=torch.bfloat16)
    places = []
    for _, key, value in alone:
        for token in range(len(key)):
            if token % size == 0:
                page = pages.pop()
            cache[page, token % size] = torch.cat([key[token], value[token]], dim=-1)
            places.append([page, token % size])
    query = torch.cat([query[-count:] for (query, _, _), count in zip(alone, new, strict=True)])
    ends = [[*accumulate(each)] for each in (new, LENGTHS)]
    found = attend_in_pages(query, *cache.chunk(2, dim=-1), 0.25, torch.tensor(places), *ends)
    each = zip(alone, new, strict=True)
    assert torch.equal(found, torch.cat([attend(*given, 0.25)[-count:] for given, count in each]))


def test_a_layer_that_attends_to_some_of_the_tokens_is_refused():
    config = Qwen2Config(**CONFIG.to_dict() | {"use_sliding_window": True, "sliding_window": 4, "layer_types": None})
    config.layer_types = ["sliding_attention"] * config.num_hidden_layers
    model = AutoModelForCausalLM.from_config(config, attn_implementation=EXACT)
    with pytest.raises(ConfigError, match="not to 4 of them"):
        model(input_ids=torch.arange(9)[None])


def test_gradients_are_those_of_torchs_attention():
    given = [each.requires_grad_() for each in states(sum(LENGTHS), torch.float32)]
    factor = torch.randn(sum(LENGTHS), 4, 16, generator=torch.Generator().manual_seed(1))
    row = [each.transpose(0, 1)[None] for each in given]
    found, _ = attend_exactly(torch.nn.Module(), *row, None, scaling=0.3, sequence_lengths=list(LENGTHS))
    (found[0] * factor).sum().backward()
    gradients = [each.grad.clone() for each in given]
    parts = zip(*(torch.split(each, LENGTHS) for each in given), strict=True)
    expected = torch.cat([fused(*part, 0.3) for part in parts])
    for each in given:
        each.grad = None
    (expected * factor).sum().backward()
    torch.testing.assert_close(gradients, [each.grad for each in given])


def batch(rows: list[int]) -> DataProto:
    """Rows of `LENGTHS`, padded on both sides as the trainer has them."""
    width = max(LENGTHS)
    ids, mask = (torch.zeros(len(rows), PROMPT + width, dtype=torch.long) for _ in range(2))
    for place, row in enumerate(rows):
        prompt = 1 + row % PROMPT
        start, stop = PROMPT - prompt, PROMPT + LENGTHS[row]
        generator = torch.Generator().manual_seed(row)
        ids[place, start:stop] = torch.randint(1, 97, (stop - start,), generator=generator)
        mask[place, start:stop] = 1
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    return DataProto.from_single_dict(
        {"input_ids": ids, "attention_mask": mask, "position_ids": positions, "responses": ids[:, PROMPT:]}
    )


@needs_same_rows
@pytest.mark.parametrize("pack", [True, False])
@pytest.mark.parametrize("config", [CONFIG, EXPERTS], ids=lambda config: config.model_type)
def test_log_probs_in_bfloat16_do_not_depend_on_the_micro_batch(config, pack):
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16, attn_implementation=EXACT).eval()
    agree(model)

    def scored(rows, pack):
        found, _ = response_log_probs(model, batch(rows), temperature=0.7, calculate_entropy=False, pack=pack)
        return dict(zip(rows, found, strict=True))

    with torch.no_grad():
        alone = {row: scored([row], False)[row] for row in range(len(LENGTHS))}
        for rows in ([0, 1, 2, 3], [3, 1], [2, 0]):
            for row, found in scored(rows, pack).items():
                assert torch.equal(found, alone[row])


@needs_same_rows
@pytest.mark.parametrize("shape", [(1, 64), (4, 64), (32, 64), (64, 64), (64, 2048)])
def test_sums_have_one_order_for_any_number_of_rows(shape):
    """Of few products torch takes another kernel, which these sums of rounding errors would show."""
    weight, rows = cancelling(shape, 80, torch.Generator().manual_seed(0))
    whole = product(rows, weight)
    assert whole.any()
    for count in range(1, 80):
        assert torch.equal(product(rows[:count], weight), whole[:count])


@needs_same_rows
def test_a_token_gets_the_same_experts_and_the_same_from_them_beside_any_others():
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(EXPERTS, dtype=torch.bfloat16)
    agree(model)
    block, generator = model.model.layers[0].mlp, torch.Generator().manual_seed(0)
    with torch.no_grad():
        weight, rows = cancelling(tuple(block.gate.weight.shape), 40, generator)
        block.gate.weight.copy_(weight)
        whole, of_all = block.gate(rows), block(rows[None])[0]
        for count in (1, 2, 3, 7, 33):
            for few, every in zip(block.gate(rows[:count]), whole, strict=True):
                assert torch.equal(few, every[:count])
            assert torch.equal(block(rows[None, :count])[0], of_all[:count])


def test_experts_compute_what_transformers_computes():
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(EXPERTS, dtype=torch.float32, experts_implementation="eager")
    states = torch.randn(1, 30, EXPERTS.hidden_size)
    with torch.no_grad():
        expected = model.model.layers[0].mlp(states)
        agree(model)
        torch.testing.assert_close(model.model.layers[0].mlp(states), expected)


def test_a_matrix_whose_product_depends_on_the_number_of_rows_is_found():
    def of_seven(rows, weight):
        return torch.full((len(rows), len(weight)), float(len(rows) == 7))

    assert layer_that_differs(CONFIG, of_seven) == "a linear layer of 64 to 97 gives 7 rows other bits than 64"
