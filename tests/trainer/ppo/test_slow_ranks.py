"""Which rank is told to be slow, and when."""

from __future__ import annotations

import logging

import pytest

from verl.trainer.ppo.slow_ranks import STEPS, SlowRanks
from verl.workers.own_time import Own

PHASE = "update_actor"


def ranks(*seconds, tokens=1000):
    return [{PHASE: Own(each, tokens)} for each in seconds]


@pytest.fixture
def look(caplog):
    caplog.set_level(logging.INFO)
    return SlowRanks(lambda rank: f"pid {100 + rank} on 10.0.0.{rank}").look


def warnings(caplog):
    return [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]


def test_a_rank_that_is_slow_for_several_steps_is_named_once(look, caplog):
    for step in range(3 * STEPS):
        metrics = look(ranks(1.0, 1.1, 2.0, 0.9))
        assert len(warnings(caplog)) == (step + 1 >= STEPS)
    assert warnings(caplog) == [
        f"trainer rank 2 (pid 102 on 10.0.0.2) is slow: in {PHASE} it takes 2.0 times as long per token as the "
        f"others, which wait for it (median of {STEPS} steps; trainer/slowness/{PHASE})"
    ]
    assert metrics[f"trainer/slowest_rank/{PHASE}"] == 2
    assert metrics[f"trainer/slowness/{PHASE}"] == 2.0
    assert metrics[f"trainer/own_s/{PHASE}/rank_3"] == 0.9
    for _ in range(STEPS):
        look(ranks(1.0, 1.1, 1.0, 0.9))
    assert f"trainer rank 2 (pid 102 on 10.0.0.2) is as fast as the others again in {PHASE}" in caplog.text


@pytest.mark.parametrize(
    "slow",
    [
        (1.0, 1.25),
        (1.0, 1.4, 1.9, 1.1, 1.6),  # all of them differ so much
        (1.0, 1.0, 0.1),  # one is fast
    ],
)
def test_what_differs_a_little_or_among_all_ranks_is_not_told(look, caplog, slow):
    for _ in range(2 * STEPS):
        look(ranks(*slow))
    assert not warnings(caplog)


def test_one_of_two_ranks_is_told_too(look, caplog):
    for _ in range(STEPS):
        look(ranks(1.0, 1.5))
    assert "trainer rank 1 " in warnings(caplog)[0]


def test_milliseconds_are_not_told(look, caplog):
    for _ in range(STEPS):
        metrics = look(ranks(0.001, 0.003))
    assert metrics[f"trainer/slowness/{PHASE}"] == 3.0
    assert not warnings(caplog)


def test_what_happens_in_a_step_or_two_is_not_told(look, caplog):
    for _ in range(3):
        for rank in (1.0, 2.0, 1.0, 9.0, 1.0):
            look(ranks(1.0, 1.0, rank))
    assert not warnings(caplog)


def test_a_step_in_which_others_are_slow_too_hides_nobody(look, caplog):
    for others in (1.0, 1.0, 9.0, 1.0, 1.0):
        look(ranks(others, 2.0))
    assert "trainer rank 1 " in warnings(caplog)[0]


def test_a_rank_with_more_tokens_is_not_slow(look, caplog):
    for _ in range(STEPS):
        metrics = look([{PHASE: Own(1.0, 1000)}, {PHASE: Own(2.0, 2000)}])
    assert not warnings(caplog)
    assert metrics[f"trainer/slowness/{PHASE}"] == 1.0


def test_a_rank_alone_has_nobody_to_be_compared_with(look, caplog):
    for _ in range(STEPS):
        assert look(ranks(1.0)) == {f"trainer/own_s/{PHASE}/rank_0": 1.0}
    assert look([{}, {}]) == {}
    assert not warnings(caplog)


def test_a_rank_that_was_started_again_begins_anew(caplog):
    pid = 1
    slow_ranks = SlowRanks(lambda rank: f"pid {pid + rank} on 10.0.0.1")
    for _ in range(STEPS - 1):
        slow_ranks.look(ranks(1.0, 2.0))
    pid = 11
    slow_ranks.look(ranks(1.0, 2.0))
    assert not warnings(caplog)
