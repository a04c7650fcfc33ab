"""Metrics of validation against PyPI's verl: names and values of the same random results."""

from __future__ import annotations

from random import Random
from typing import Any

import pytest

from tests.originals.original import VERL, computed, differences
from verl.trainer.ppo.metric_utils import process_validation_metrics, validation_names


def results(seed: int, responses: int, **infos: Any) -> dict[str, Any]:
    """Of three prompts of one data source and two of another, shuffled."""
    draw = Random(seed)
    rows = [(source, f"{source}{row}") for source, count in (("a/b", 3), ("c", 2)) for row in range(count)]
    rows = [row for row in rows for _ in range(responses)]
    draw.shuffle(rows)
    values = {
        "reward": [draw.choice([-1.0, 0.0, 0.25, 1.0]) for _ in rows],
        **{name: [draw.choice(values) for _ in rows] for name, values in infos.items()},
    }
    return {"sources": [row[0] for row in rows], "uids": [row[1] for row in rows], "infos": values, "turns": []}


CASES = {
    "one response": results(0, 1, acc=[0.0, 1.0]),
    "no acc": results(1, 4),
    "acc and predictions": results(2, 4, acc=[0.0, 1.0], pred=["1", "2", "3"]),
    "a number that is no power of two": results(3, 5, acc=[0.0, 1.0], pred=["1", "2"], length=[1, 2, 3]),
    "many": results(4, 16, acc=[True, False], pred=["1", "2", "3"]),
    "turns": results(5, 2, acc=[0.0, 1.0]) | {"turns": [2, 4, 2, 6, 8, 2, 2, 4, 4, 2]},
    "responses without a prediction": results(8, 4, acc=[0.0, 1.0], pred=["1", "2", "2", None]),
    "no predictions at all": results(9, 3, acc=[0.0, 1.0], pred=[None]),
    "empty predictions": results(10, 3, acc=[0.0, 1.0], pred=["", " ", "1"]),
    "texts": results(6, 2, acc=[0.0, 1.0], comment=["good", "bad"]),
}
UNEVEN = results(7, 3, acc=[0.0, 1.0])
for rows in (UNEVEN["sources"], UNEVEN["uids"], *UNEVEN["infos"].values()):
    del rows[:2]
CASES["prompts with different numbers of responses"] = UNEVEN
PREDICTIONS = ([0, "0", 1], ["1", "01", 1.0, True], ["a", "", None], [1, 1.0, True, 3.5], ["1", "2"])
DRAWN = {
    "acc": [0.0, 1.0],
    "right": [True, False],
    "length": [1, 2, 3],
    "comment": ["good", ""],
    "number as text": ["1", "2"],
    "of some": [1.0, 0.5, None],
    "odd": [float("nan"), float("inf"), 1.0],
}


def drawn(seed: int) -> dict[str, Any]:
    """Two prompts, each with its own number of responses."""
    draw = Random(seed)
    uids = [uid for uid in "xy" for _ in range(draw.choice((1, 2, 3, 5)))]
    infos = {name: [draw.choice(DRAWN[name]) for _ in uids] for name in draw.sample([*DRAWN], 2)}
    predictions = PREDICTIONS[seed % len(PREDICTIONS)]
    infos["reward"] = [draw.choice([-1.0, 0.3, 1.0]) for _ in uids]
    infos["pred"] = [draw.choice(predictions) for _ in uids]
    return {"sources": ["a/b"] * len(uids), "uids": uids, "infos": infos, "turns": []}


CASES |= {f"drawn {seed}": drawn(seed) for seed in range(12)}
NO_NUMBERS = {
    "lists": results(11, 3, acc=[0.0, 1.0], scores=[[1, 2], [3, 4]]),
    "dicts": results(12, 3, acc=[0.0, 1.0], scores=[{"a": 1}]),
    "predictions that are lists": results(13, 3, acc=[0.0, 1.0], pred=[[1], [2]]),
    "a text beside a number": {
        "sources": ["c"] * 3,
        "uids": ["x"] * 3,
        "turns": [],
        "infos": {"reward": [1.0, 0.0, 0.5], "scores": [1.0, "a", 2.0]},
    },
}


@pytest.fixture(scope="module")
def verls() -> dict[str, dict[str, float]]:
    every = CASES | NO_NUMBERS
    return dict(zip(every, computed("validate.py", [*every.values()], VERL), strict=True))


def named(case: dict[str, Any]) -> dict[str, float]:
    return validation_names(process_validation_metrics(case["sources"], case["uids"], case["infos"]))


@pytest.mark.parametrize("name", CASES)
def test_metrics_of_validation_have_verls_names_and_values(verls: dict[str, Any], name: str) -> None:
    ours = named(CASES[name])
    if "error" in verls[name]:  # as in NO_NUMBERS
        predictions = CASES[name]["infos"]["pred"]
        assert {type(one) for one in predictions} - {str, type(None)}
        assert any(isinstance(one, str) for one in predictions)
        return
    expected = {key: value for key, value in verls[name].items() if "num_turns" not in key}
    assert ours == pytest.approx(expected, abs=1e-9, nan_ok=True)


def test_turns_have_verls_names(verls: dict[str, Any]) -> None:
    turns = {key: value for key, value in verls["turns"].items() if "num_turns" in key}
    assert turns == {"val-aux/num_turns/min": 2, "val-aux/num_turns/max": 8, "val-aux/num_turns/mean": 3.6}


@pytest.mark.parametrize("name", NO_NUMBERS)
def test_values_that_are_no_numbers_are_listed_with_the_reason(verls: dict[str, Any], name: str) -> None:
    assert differences()["values of a validation that are no numbers"]["why"]
    ours = named(NO_NUMBERS[name])
    assert ours
    assert not any("/scores/" in key for key in ours)
    assert "error" in verls[name] or any("/scores/" in key for key in verls[name])
