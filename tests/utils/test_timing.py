import time

import pytest

from verl.utils.timing import marked_timer


def test_the_same_name_accumulates_within_a_step():
    timings = {}
    for _ in range(2):
        with marked_timer("gen", timings):
            time.sleep(0.01)
    assert 0.02 <= timings["gen"] < 1


def test_a_phase_that_fails_is_still_timed():
    timings = {}
    with pytest.raises(KeyError), marked_timer("gen", timings):
        raise KeyError
    assert timings["gen"] >= 0
