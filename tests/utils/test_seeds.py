"""Seeds follow from what they are for, in every process, and differ where that differs."""

from __future__ import annotations

import pytest

from verl.utils.seeds import BELOW, derived, derived_name


def test_seeds_are_the_same_in_every_process():
    """Numbers that were written down once: a hash that is salted per process would give others."""
    assert derived(1, 2, "a", 3) == 3532312939658043697
    assert derived_name(1, 0, 64, 3) == "06e61919cfd915389982b3200958119c"


@pytest.mark.parametrize("other", [(1, 2, "a", 4), (2, 1, "a", 3), (1, 2, "a3"), (12, "a", 3), (1, 2, None, 3)])
def test_seeds_of_other_things_are_others(other: tuple[object, ...]):
    assert derived(1, 2, "a", 3) != derived(*other)
    assert derived_name(1, 2, "a", 3) != derived_name(*other)


def test_seeds_fit_into_64_bits_with_a_sign():
    found = [derived(number) for number in range(1000)]
    assert len(set(found)) == 1000
    assert 0 <= min(found) < max(found) < BELOW
    assert max(found) > BELOW // 2
