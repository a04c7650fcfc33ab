"""The length of a run and of its schedules against PyPI's verl, from data, epochs and keys."""

from __future__ import annotations

from random import Random
from typing import Any

import pytest

from tests.originals.original import VERL, computed, differences
from verl.trainer.config.loader import load_config
from verl.trainer.ppo.settled import scheduled, total_steps
from verl.utils.dataset import build_dataloader

OWN = {"actor_rollout_ref.actor.optim.total_training_steps": 9, "critic.optim.total_training_steps": 11}
Case = tuple[dict[str, Any], int]


def case(draw: Random) -> Case:
    options = {"data.train_batch_size": draw.randint(1, 9), "trainer.total_epochs": draw.randint(1, 4)}
    if draw.random() < 0.3:
        options["trainer.total_training_steps"] = draw.randint(1, 50)
    return options, draw.randint(9, 60)


CASES = [case(Random(number)) for number in range(8)]
LONGER: Case = ({"data.train_batch_size": 4, "trainer.total_epochs": 3, **OWN}, 25)


def ours(options: dict[str, Any], rows: int) -> list[int]:
    config = load_config(["data.train_files=x.parquet", *(f"{key}={value}" for key, value in options.items())])
    data: Any = [{}] * rows
    steps = total_steps(config, len(build_dataloader(data, config.data, config.data.train_batch_size, True, True)))
    run = scheduled(config, steps)
    return [steps, *(role.optim.total_training_steps for role in (run.actor_rollout_ref.actor, run.critic))]


@pytest.fixture(scope="module")
def both() -> list[tuple[Case, list[int], list[int]]]:
    cases = [*CASES, LONGER]
    return [
        (given, verls, ours(*given))
        for given, verls in zip(cases, computed("count_steps.py", cases, VERL), strict=True)
    ]


def test_a_run_and_its_schedules_are_as_long_as_verls(both: list[tuple[Case, list[int], list[int]]]) -> None:
    for given, verls, own in both[:-1]:
        assert own == verls, given


def test_a_schedule_with_a_length_of_its_own_is_listed_with_the_reason(both: list[Any]) -> None:
    assert differences()["`optim.total_training_steps`"]["why"]
    _, verls, own = both[-1]
    assert (verls, own) == ([18, 18, 18], [18, 9, 11])
