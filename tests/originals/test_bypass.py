"""Losses of `bypass_mode`, with weights and rejection of the policy as it is, against PyPI's verl."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from tests.originals.batches import WHOLE
from tests.originals.original import OURS, VERL, computed, differences
from verl.workers.config.actor import LOSS_AGG_MODES
from verl.workers.config.algorithm import REJECTIONS

BATCHES = {
    name: {
        "old_log_prob": given["old_log_prob"],
        "log_prob": given["log_prob"],
        "advantages": given["values"],
        "response_mask": given["response_mask"],
    }
    for name, given in WHOLE.items()
}
REJECTING = [
    {"rollout_rs": name, "rollout_rs_threshold": "0.8_1.2" if name.endswith("k1") else 0.1} for name in REJECTIONS
]
WEIGHING = [
    {"loss_type": "reinforce", "rollout_is": level, "rollout_is_threshold": bound, "rollout_is_batch_normalize": divide}
    for level in ("token", "sequence")
    for bound in (1.5, "0.7_1.3")
    for divide in (False, True)
]
CORRECTIONS = [
    {},
    {"loss_type": "reinforce"},
    {"rollout_is": "token", "rollout_is_threshold": 1.1},  # the clipped ratio is the weight
    *REJECTING,
    *WEIGHING,
    *({**weighing, **rejecting} for weighing, rejecting in zip(WEIGHING, REJECTING, strict=False)),
]


@pytest.fixture(scope="module")
def both() -> list[tuple[tuple[str, str, dict[str, Any]], dict[str, Any], dict[str, Any]]]:
    """(case, verl's, ours) of every batch, aggregation and correction: of a run's loss, and of the public function."""
    cases = list(itertools.product(BATCHES, LOSS_AGG_MODES, CORRECTIONS))
    given = {"batches": BATCHES, "cases": cases}
    verls, ours = (computed("score_bypass.py", given, folder) for folder in (VERL, OURS))
    return [(case, *one, way) for case, one, ways in zip(cases, verls, ours, strict=True) for way in ways]


@pytest.mark.parametrize("mode", LOSS_AGG_MODES)
def test_a_loss_of_bypass_mode_and_its_gradient_are_verls(both: list[Any], mode: str) -> None:
    compared = [(case, verls, ours) for case, verls, ours in both if case[1] == mode]
    assert len(compared) == 2 * len(BATCHES) * len(CORRECTIONS)
    for case, verls, ours in compared:
        if "error" in verls:
            continue
        assert ours["loss"] == pytest.approx(verls["loss"], abs=1e-5), case
        assert ours["gradient"] == pytest.approx(verls["gradient"], abs=1e-5), case


def test_what_a_loss_of_bypass_mode_tells_has_verls_names_and_values(both: list[Any]) -> None:
    for case, verls, ours in both:
        if "error" not in verls:
            told = {name: value for name, value in ours["metrics"].items() if name != "actor/pg_loss"}
            assert told == pytest.approx(verls["metrics"], rel=1e-4, abs=5e-5), case


def test_weights_that_are_all_zero_are_listed_with_the_reason(both: list[Any]) -> None:
    assert differences()["importance weights that are all 0"]["why"]
    failing = [(case, ours) for case, verls, ours in both if "error" in verls]
    assert 0 < len(failing) < len(both) / 20
    for case, ours in failing:
        assert case[2]["rollout_is_threshold"] == "0.7_1.3"
        assert ours["loss"] == 0.0
