"""Metrics of validation against PyPI's verl: names and values of the same random results."""

from __future__ import annotations

from random import Random
from typing import Any

import pytest

from tests.originals.original import VERL, computed
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


@pytest.fixture(scope="module")
def verls() -> dict[str, dict[str, float]]:
    return dict(zip(CASES, computed("validate.py", [*CASES.values()], VERL), strict=True))


@pytest.mark.parametrize("name", CASES)
def test_metrics_of_validation_have_verls_names_and_values(verls: dict[str, Any], name: str) -> None:
    case = CASES[name]
    ours = validation_names(process_validation_metrics(case["sources"], case["uids"], case["infos"]))
    expected = {key: value for key, value in verls[name].items() if "num_turns" not in key}
    assert ours == pytest.approx(expected, abs=1e-9)


def test_turns_have_verls_names(verls: dict[str, Any]) -> None:
    turns = {key: value for key, value in verls["turns"].items() if "num_turns" in key}
    assert turns == {"val-aux/num_turns/min": 2, "val-aux/num_turns/max": 8, "val-aux/num_turns/mean": 3.6}
