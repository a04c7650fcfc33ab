from itertools import product

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from verl.utils.seqlen_balancing import get_seqlen_balanced_partitions

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
