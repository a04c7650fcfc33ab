"""Losses of `bypass_mode`, with weights and rejection of the policy as it is, against PyPI's verl."""

from __future__ import annotations

import itertools
from random import Random
from typing import Any

import pytest

from tests.originals.batches import WHOLE, WITH_EMPTY, Batch
from tests.originals.draws import batches, bypass_options
from tests.originals.original import OURS, VERL, computed, differences
from verl.workers.config.actor import LOSS_AGG_MODES
from verl.workers.config.algorithm import REJECTIONS


def with_advantages(given: dict[str, Batch]) -> dict[str, Any]:
    tensors = ("old_log_prob", "log_prob", "response_mask")
    return {name: {key: one[key] for key in tensors} | {"advantages": one["values"]} for name, one in given.items()}


BATCHES = with_advantages(WHOLE | WITH_EMPTY)
DRAW = Random(0)
DRAWN = with_advantages(batches(DRAW, 30, empty=False) | batches(DRAW, 15, empty=True))
DRAWN_CASES = [(DRAW.choice([*DRAWN]), DRAW.choice(LOSS_AGG_MODES), *bypass_options(DRAW)) for _ in range(600)]
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


Case = tuple[str, str, dict[str, Any], dict[str, Any]]
Compared = list[tuple[Case, dict[str, Any], dict[str, Any]]]


@pytest.fixture(scope="module")
def both() -> Compared:
    """(case, verl's, ours) of every batch, aggregation and correction, and of options that are drawn: of a run's loss,
    and of the public function."""
    cases: list[Case] = [*itertools.product(BATCHES, LOSS_AGG_MODES, CORRECTIONS, [{}]), *DRAWN_CASES]
    given = {"batches": BATCHES | DRAWN, "cases": cases}
    verls, ours = (computed("score_bypass.py", given, folder) for folder in (VERL, OURS))
    return [(case, *one, way) for case, one, ways in zip(cases, verls, ours, strict=True) for way in ways]


def without_tokens(case: Case) -> bool:
    """Whether some responses of its batch are empty."""
    return not all(any(row) for row in (BATCHES | DRAWN)[case[0]]["response_mask"])


@pytest.mark.parametrize("mode", LOSS_AGG_MODES)
def test_a_loss_of_bypass_mode_and_its_gradient_are_verls(both: Compared, mode: str) -> None:
    compared = [(case, verls, ours) for case, verls, ours in both if case[1] == mode]
    assert len(compared) > 2 * len(BATCHES) * len(CORRECTIONS) + 100
    for case, verls, ours in compared:
        if "error" in verls:
            continue
        assert ours["loss"] == pytest.approx(verls["loss"], rel=1e-5, abs=1e-5), case
        assert ours["gradient"] == pytest.approx(verls["gradient"], rel=1e-5, abs=1e-5), case


def test_what_a_loss_of_bypass_mode_tells_has_verls_names_and_values(both: Compared) -> None:
    """Beside empty responses, what is no mean over sequences."""
    for case, verls, ours in both:
        if "error" in verls:
            continue
        told = {name: value for name, value in ours["metrics"].items() if name != "actor/pg_loss"}
        assert told.keys() == verls["metrics"].keys(), case
        listed = "rollout_corr/" if without_tokens(case) else "none"
        for name, value in told.items():
            near = 2e-3 if name.endswith("_std") else 5e-5  # verl's deviations of equal numbers are not 0
            expected = pytest.approx(verls["metrics"][name], rel=1e-4, abs=near)
            assert name.startswith(listed) or value == expected, (case, name)


def test_weights_that_are_all_zero_are_listed_with_the_reason(both: Compared) -> None:
    assert differences()["importance weights that are all 0"]["why"]
    failing = [(case, ours) for case, verls, ours in both if "error" in verls]
    assert 0 < len(failing) < len(both) / 20
    for case, ours in failing:
        assert "_" in case[2]["rollout_is_threshold"]
        assert ours["loss"] == 0.0 or case[2]["loss_type"] == "ppo_clip"  # whose ratio is its weight
