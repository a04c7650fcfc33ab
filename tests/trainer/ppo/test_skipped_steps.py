from __future__ import annotations

import logging

import pytest

from verl.trainer.ppo.skipped_steps import Diverged, SkippedSteps

NAN = float("nan")
GOOD = {"actor/skipped_steps": 0.0, "actor/grad_norm": 1.0, "actor/pg_loss": 0.1}
BAD = {"actor/skipped_steps": 2.0, "actor/grad_norm": NAN, "actor/pg_loss": NAN}
GRADIENTS = {"critic/skipped_steps": 1.0, "critic/grad_norm": float("inf"), "critic/loss": 0.1}


def test_so_many_steps_in_a_row_without_an_update_end_a_run(caplog: pytest.LogCaptureFixture):
    skipped = SkippedSteps(3)
    found = []
    for step, metrics in enumerate([GOOD, BAD, BAD, GOOD, GRADIENTS, BAD], 1):
        skipped.look(step, metrics)
        found.append(skipped.in_a_row)
    assert found == [0, 1, 2, 0, 1, 2]
    warned = [record.message for record in caplog.records if record.levelno == logging.WARNING]
    assert warned == [
        "step 2: 2 of the actor's optimizer steps were left out: not finite are actor/pg_loss, and with them the "
        "gradients",
        "step 5: 1 of the critic's optimizer steps were left out: the gradients' norm is not finite, though the loss "
        "is",
    ]
    with pytest.raises(Diverged, match=r"since step 5 each of 3 steps skipped an update: not finite are"):
        skipped.look(7, BAD)


def test_a_step_that_is_made_again_counts_once():
    skipped = SkippedSteps(3)
    for step in (4, 4, 5, 5, 3, 4):
        skipped.look(step, BAD)
    assert skipped.in_a_row == 2


@pytest.mark.parametrize("whose", ["actor", "critic"])
def test_the_first_one_may_be_the_last_and_it_is_said_whose(whose: str):
    with pytest.raises(Diverged, match=f"since step 1 .* Nothing is learned any more by the {whose}. Resume"):
        SkippedSteps(1).look(1, {f"{whose}/skipped_steps": 1.0})
