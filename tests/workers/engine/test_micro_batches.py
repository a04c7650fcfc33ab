from __future__ import annotations

from fractions import Fraction

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from verl.protocol import DataProto
from verl.utils.config import ConfigError
from verl.workers.config import ActorConfig
from verl.workers.engine.micro_batches import (
    MicroBatchLimits,
    partition,
    sequence_lengths,
    sequence_widths,
    split_to_count,
)
from verl.workers.mini_batches import iterate_mini_batches, mini_batch_size_per_rank, num_mini_batches, shuffler

WIDTHS = st.lists(st.tuples(st.integers(0, 20), st.integers(0, 20)), max_size=30)


def test_widths_are_counted_from_the_border_between_prompt_and_response():
    mask = torch.tensor([[0, 1, 1, 1, 0], [1, 1, 1, 0, 0], [0, 0, 1, 1, 1], [0, 1, 0, 0, 1]])
    data = DataProto.from_dict(tensors={"attention_mask": mask, "responses": torch.zeros(4, 2, dtype=torch.int64)})
    assert sequence_widths(data) == [(2, 1), (3, 0), (1, 2), (2, 2)]


@given(widths=WIDTHS, max_tokens=st.integers(1, 100), max_sequences=st.integers(1, 5) | st.none())
def test_every_sequence_is_in_one_group_and_no_group_exceeds_the_limits(widths, max_tokens, max_sequences):
    limits = MicroBatchLimits(max_tokens=max_tokens, max_sequences=max_sequences)
    groups = partition(widths, limits)
    assert sorted(index for group in groups for index in group) == list(range(len(widths)))
    for group in groups:
        width = max(widths[index][0] for index in group) + max(widths[index][1] for index in group)
        assert len(group) == 1 or len(group) * width <= max_tokens
        assert max_sequences is None or len(group) <= max_sequences


def test_lengths_are_those_of_the_furthest_position_and_not_of_padding():
    mask = torch.tensor([[0, 1, 1, 1, 0], [1, 1, 1, 1, 1]])
    positions = torch.tensor([[0, 0, 1, 2, 3], [0, 1, 2, 3, 4]])
    assert sequence_lengths(DataProto.from_dict(tensors={"attention_mask": mask, "position_ids": positions})) == [3, 5]


@given(widths=WIDTHS, border=st.integers(0, 40), max_tokens=st.integers(1, 200))
def test_sequences_of_a_group_are_of_one_regime(widths, border, max_tokens):
    regimes = [sum(width) > border for width in widths]
    groups = partition(widths, MicroBatchLimits(max_tokens=max_tokens), regimes=regimes)
    assert sorted(index for group in groups for index in group) == list(range(len(widths)))
    assert all(len({regimes[index] for index in group}) == 1 for group in groups)


@given(widths=WIDTHS, max_tokens=st.integers(1, 100))
def test_of_packed_sequences_only_tokens_count(widths, max_tokens):
    groups = partition(widths, MicroBatchLimits(max_tokens=max_tokens), packed=True)
    assert sorted(index for group in groups for index in group) == list(range(len(widths)))
    sizes = [sum(sum(widths[index]) for index in group) for group in groups]
    assert all(size <= max_tokens or len(group) == 1 for size, group in zip(sizes, groups, strict=True))
    first = (sum(widths[group[0]]) for group in groups[1:])
    assert all(size + following > max_tokens for size, following in zip(sizes, first, strict=False))


@given(widths=WIDTHS, count=st.integers(0, 30))
def test_groups_are_split_until_there_are_as_many_as_asked_for(widths, count):
    groups = partition(widths, MicroBatchLimits(max_sequences=7))
    if count > len(widths):
        with pytest.raises(ValueError, match="same number of sequences"):
            split_to_count(groups, count)
        return
    result = split_to_count(groups, count)
    assert len(result) == max(count, len(groups))
    assert all(result)
    assert sorted(index for group in result for index in group) == list(range(len(widths)))


def test_the_configuration_chooses_between_a_token_budget_and_a_number_of_sequences():
    assert MicroBatchLimits.choose(dynamic=True, max_tokens=9, max_sequences=3) == MicroBatchLimits(max_tokens=9)
    assert MicroBatchLimits.choose(dynamic=False, max_tokens=9, max_sequences=3) == MicroBatchLimits(max_sequences=3)
    with pytest.raises(ValueError, match="max_tokens must be positive"):
        MicroBatchLimits(max_tokens=0)


def test_a_mini_batch_of_prompts_is_spread_over_the_ranks():
    assert mini_batch_size_per_rank(6, 4, 3) == 8
    assert mini_batch_size_per_rank(3, 3, 2) == Fraction(9, 2)
    with pytest.raises(ConfigError, match=r"ppo_mini_batch_size=1 x rollout\.n=3 = 3 sequences are fewer than 4"):
        mini_batch_size_per_rank(1, 3, 4)


def rows(**options):
    data = DataProto.from_dict(tensors={"row": torch.arange(5)})
    generator = torch.Generator().manual_seed(0)
    options = {"size": 2} | options
    size = options.pop("size")
    config = ActorConfig(**options)
    parts = list(iterate_mini_batches(data, config, size=size, generator=generator))
    assert num_mini_batches(len(data), config, size) == len(parts)
    return [part.batch["row"].tolist() for part in parts]


def test_every_epoch_walks_through_the_batch_in_order_or_shuffled():
    assert rows(ppo_epochs=2) == [[0, 1], [2, 3], [4]] * 2
    shuffled = rows(ppo_epochs=1, shuffle=True)
    assert [len(part) for part in shuffled] == [2, 2, 1]
    assert sorted(sum(shuffled, [])) == list(range(5))
    assert shuffled != rows(ppo_epochs=1)


def test_each_rank_shuffles_each_step_in_an_order_of_its_own_which_a_repeated_step_has_again():
    def order(rank, step):
        data = DataProto.from_dict({"row": torch.arange(2)}, meta_info={"global_steps": step})
        return tuple(torch.randperm(1000, generator=shuffler(7, rank, data)).tolist())

    orders = [order(rank, step) for rank in range(3) for step in range(3)]
    assert len(set(orders)) == 9
    assert orders == [order(rank, step) for rank in range(3) for step in range(3)]


def test_mini_batches_that_do_not_divide_over_the_ranks_are_as_many_and_nearly_equal():
    """Ten sequences in two steps of five, on two ranks: here are three of one step and two of the other."""
    assert rows(size=mini_batch_size_per_rank(5, 1, 2)) == [[0, 1, 2], [3, 4]]
