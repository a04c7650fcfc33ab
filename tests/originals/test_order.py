"""The order of prompts against PyPI's verl: batches of the same seed."""

from __future__ import annotations

from random import Random
from typing import Any

import pytest

from tests.originals.original import VERL, computed, differences
from verl.utils.dataset import build_dataloader
from verl.workers.config import DataConfig


def case(draw: Random) -> dict[str, Any]:
    rows = draw.randint(10, 60)
    return {
        "rows": rows,
        "batch_size": draw.randint(1, 9),
        "shuffle": draw.random() < 0.7,
        "seed": draw.randint(0, 999),
    }


CASES = [case(Random(number)) for number in range(40)]


def ours(given: dict[str, Any]) -> list[list[list[int]]]:
    """Batches of three epochs."""
    rows: Any = [{"row": number} for number in range(given["rows"])]
    config = DataConfig(seed=given["seed"], shuffle=given["shuffle"])
    loader = build_dataloader(rows, config, given["batch_size"], given["shuffle"], drop_last=True)
    return [[batch["row"].tolist() for batch in loader] for _ in range(3)]


@pytest.fixture(scope="module")
def both() -> list[tuple[dict[str, Any], Any, Any]]:
    return [
        (given, verls, ours(given)) for given, verls in zip(CASES, computed("order_rows.py", CASES, VERL), strict=True)
    ]


def test_a_first_epoch_has_verls_batches(both: list[tuple[dict[str, Any], Any, Any]]) -> None:
    for given, verls, own in both:
        assert own[0] == verls[0], given
        assert given["shuffle"] or own == verls, given


def test_the_order_of_later_epochs_is_listed_with_the_reason(both: list[tuple[dict[str, Any], Any, Any]]) -> None:
    assert differences()["order of shuffled prompts from the second epoch on"]["why"]
    for given, verls, own in both:
        if given["shuffle"]:
            assert own[1:] != verls[1:], given
            assert own[1] != own[0], given
