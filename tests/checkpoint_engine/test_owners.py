"""Who sends what several ranks hold."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from verl.checkpoint_engine.plan.owners import assign

EXAMPLES = settings(deadline=None, max_examples=60)


@EXAMPLES
@given(
    st.lists(st.integers(1, 1000), min_size=1, max_size=400),
    st.integers(2, 6),
    st.lists(st.integers(0, 3000), min_size=6, max_size=6),
)
def test_ranks_of_one_set_end_up_a_piece_apart_unless_one_had_too_much_before(
    nbytes: list[int], ranks: int, before: list[int]
):
    load = np.array(before, np.int64)
    owner = assign(np.array(nbytes), np.zeros(len(nbytes), np.int64), [tuple(range(ranks))], load)
    sent = np.bincount(owner, nbytes, 6) + load
    took = np.unique(owner)
    assert took.max() < ranks
    assert sent[took].max() - sent[:ranks].min() <= max(nbytes)


@pytest.mark.parametrize(
    ("sets", "counts", "expected"),
    [
        ([(0, 1), (0, 1, 2, 3)], [400, 400], [200, 200, 200, 200]),
        ([(0, 1, 2, 3), (0, 1)], [400, 800], [400, 400, 200, 200]),
        ([(0,), (0, 1)], [300, 300], [300, 300]),
        ([(0, 2), (1, 3), (0, 1), (2, 3)], [400, 400, 400, 400], [400, 400, 400, 400]),
    ],
    ids=["nested", "the smaller set has more", "one rank has its own", "crossing"],
)
def test_pieces_with_little_choice_are_dealt_first(sets: list[tuple[int, ...]], counts: list[int], expected: list[int]):
    holders = np.repeat(np.arange(len(sets)), counts)
    owner = assign(np.full(len(holders), 8), holders, sets, np.zeros(len(expected), np.int64))
    assert np.bincount(owner, minlength=len(expected)).tolist() == expected
    assert all(rank in sets[index] for rank, index in zip(owner.tolist(), holders.tolist(), strict=True))


def test_most_pieces_of_a_rank_follow_each_other():
    owner = assign(np.full(1000, 8), np.zeros(1000, np.int64), [(0, 1)], np.zeros(2, np.int64))
    assert np.count_nonzero(np.diff(owner)) < 20
