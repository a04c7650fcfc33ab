from __future__ import annotations

import pytest
import torch
from transformers import get_scheduler

from verl.utils.config import ConfigError
from verl.workers.config import OptimizerConfig
from verl.workers.engine.schedule import learning_rate


def rates(steps, **options):
    config = OptimizerConfig(lr=1.0, **options)
    return [learning_rate(step, config) for step in range(steps)]


def test_a_constant_rate_follows_the_warm_up():
    assert rates(6, lr_warmup_steps=4) == [0.0, 0.25, 0.5, 0.75, 1.0, 1.0]
    assert rates(2) == [1.0, 1.0]


def test_the_warm_up_may_be_a_share_of_the_run():
    assert rates(3, lr_warmup_steps_ratio=0.2, total_training_steps=10) == [0.0, 0.5, 1.0]


def test_a_cosine_ends_at_its_floor_and_stays_there():
    values = rates(9, lr_scheduler_type="cosine", lr_warmup_steps=2, total_training_steps=6, min_lr_ratio=0.1)
    assert values[1] == 0.5
    assert values[2] == 1.0
    assert values[4] == pytest.approx(0.55)
    assert values[6:] == pytest.approx([0.1, 0.1, 0.1])


def test_a_linear_rate_falls_by_the_same_amount_every_step_to_its_floor():
    values = rates(7, lr_scheduler_type="linear", lr_warmup_steps=1, total_training_steps=5, min_lr_ratio=0.2)
    assert values == pytest.approx([0.0, 1.0, 0.8, 0.6, 0.4, 0.2, 0.2])


@pytest.mark.parametrize("name", ["constant", "linear", "cosine"])
@pytest.mark.parametrize("warmup", [0, 1, 3])
def test_every_rate_is_that_of_transformers(name, warmup):
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=1.0)
    known = "constant_with_warmup" if name == "constant" else name
    schedule = get_scheduler(known, optimizer, num_warmup_steps=warmup, num_training_steps=8)
    expected = []
    for _ in range(9):
        expected += schedule.get_last_lr()
        optimizer.step()
        schedule.step()
    got = rates(9, lr_scheduler_type=name, lr_warmup_steps=warmup, total_training_steps=8)
    assert got == pytest.approx(expected)


def test_the_warm_up_may_begin_above_zero():
    assert rates(4, lr_warmup_steps=4, lr_warmup_init=0.2) == pytest.approx([0.2, 0.4, 0.6, 0.8])


def test_without_a_first_step_at_zero_every_rate_comes_a_step_earlier():
    assert rates(5, lr_warmup_steps=4, zero_indexed_step=False) == [0.25, 0.5, 0.75, 1.0, 1.0]


def test_a_schedule_that_needs_the_length_of_the_run_says_so():
    with pytest.raises(ConfigError, match=r"lr_scheduler_type=cosine needs optim\.total_training_steps"):
        rates(1, lr_scheduler_type="cosine")
