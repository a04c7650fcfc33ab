from itertools import product

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from verl.utils.seqlen_balancing import get_reverse_idx, get_seqlen_balanced_partitions, rearrange_micro_batches

LENGTHS = st.lists(st.integers(0, 1000), min_size=1, max_size=40)


def sums(lengths, parts):
    return [sum(lengths[i] for i in part) for part in parts]


def test_the_longest_sequences_go_to_different_parts():
    assert get_seqlen_balanced_partitions([9, 1, 8, 2], 2, equal_size=True) == [[0, 1], [2, 3]]
    assert get_seqlen_balanced_partitions([9, 2, 3, 4], 2, equal_size=False) == [[0], [1, 2, 3]]


@settings(deadline=None)
@given(lengths=LENGTHS, k=st.integers(1, 8))
def test_every_sequence_is_in_exactly_one_part_and_no_part_is_empty(lengths, k):
    assume(k <= len(lengths))
    parts = get_seqlen_balanced_partitions(lengths, k, equal_size=False)
    assert len(parts) == k
    assert all(parts)
    assert sorted(i for part in parts for i in part) == list(range(len(lengths)))


@settings(deadline=None)
@given(lengths=LENGTHS, k=st.integers(1, 8))
def test_equal_sizes_are_equal(lengths, k):
    lengths = lengths * k
    parts = get_seqlen_balanced_partitions(lengths, k, equal_size=True)
    assert {len(part) for part in parts} == {len(lengths) // k}
    assert sorted(i for part in parts for i in part) == list(range(len(lengths)))


@settings(deadline=None)
@given(lengths=st.lists(st.integers(1, 100), min_size=1, max_size=7), k=st.integers(1, 3))
def test_the_largest_sum_is_within_a_third_of_the_best_possible(lengths, k):
    assume(k <= len(lengths))
    best = min(
        max(sum(n for n, part in zip(lengths, choice, strict=True) if part == p) for p in range(k))
        for choice in product(range(k), repeat=len(lengths))
    )
    assert max(sums(lengths, get_seqlen_balanced_partitions(lengths, k, equal_size=False))) <= best * 4 / 3


@settings(deadline=None)
@given(lengths=st.lists(st.integers(10, 1000), min_size=32, max_size=32))
def test_equal_parts_differ_by_at_most_the_longest_sequence(lengths):
    totals = sums(lengths, get_seqlen_balanced_partitions(lengths, 2, equal_size=True))
    assert max(totals) - min(totals) <= max(lengths)


@pytest.mark.parametrize(
    ("k", "equal_size", "message"),
    [
        (4, False, "3 sequences cannot be divided into 4 non-empty parts"),
        (0, False, "3 sequences cannot be divided into 0 non-empty parts"),
        (2, True, "3 sequences cannot be divided into 2 parts of equal size"),
    ],
)
def test_an_impossible_division_says_which_two_numbers(k, equal_size, message):
    with pytest.raises(ValueError, match=message):
        get_seqlen_balanced_partitions([1, 2, 3], k, equal_size)


@settings(deadline=None)
@given(lengths=LENGTHS, budget=st.integers(1000, 3000))
def test_micro_batches_stay_within_the_budget(lengths, budget):
    parts = rearrange_micro_batches(lengths, budget)
    assert max(sums(lengths, parts)) <= budget
    assert sorted(i for part in parts for i in part) == list(range(len(lengths)))
    assert len(parts) >= sum(lengths) / budget


@settings(deadline=None)
@given(lengths=LENGTHS, budget=st.integers(1000, 3000), extra=st.integers(0, 5))
def test_a_rank_that_needs_fewer_micro_batches_makes_exactly_as_many_as_the_others(lengths, budget, extra):
    agreed = len(rearrange_micro_batches(lengths, budget)) + extra
    assume(agreed <= len(lengths))
    parts = rearrange_micro_batches(lengths, budget, min_num_micro_batches=agreed)
    assert len(parts) == agreed
    assert max(sums(lengths, parts)) <= budget


def test_what_cannot_be_packed_is_named():
    with pytest.raises(ValueError, match="sequence 1 has 12 tokens, more than the 10 of one micro-batch"):
        rearrange_micro_batches([3, 12], 10)
    with pytest.raises(ValueError, match="2 sequences cannot be divided into 3 micro-batches; give every rank"):
        rearrange_micro_batches([3, 4], 10, min_num_micro_batches=3)
    assert rearrange_micro_batches([], 10, min_num_micro_batches=0) == []


@settings(deadline=None)
@given(order=st.permutations(range(9)))
def test_the_reverse_order_restores_the_original(order):
    items = [f"item {i}" for i in range(9)]
    shuffled = [items[i] for i in order]
    assert [shuffled[i] for i in get_reverse_idx(order)] == items
