"""Estimators, divergences, aggregations, value loss, whitening, KL in the reward and rollout correction against verl.

On ragged batches, with holes, groups of one, equal scores and empty responses (`batches`), each side in a process.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from random import Random
from typing import Any

import pytest

from tests.originals.batches import NOT_FINITE, ON_A_HOLE, ROUNDED, WHOLE, WITH_EMPTY
from tests.originals.draws import batches, divergences_in_reward, formula_cases, groups, schedules
from tests.originals.original import OURS, VERL, computed, differences
from verl.instead.names import NAMES as NAMES_INSTEAD
from verl.trainer.ppo.core_algos import ADV_ESTIMATOR_REGISTRY
from verl.workers.config.actor import LOSS_AGG_MODES
from verl.workers.config.algorithm import REJECTIONS

Case = tuple[Any, ...]
Numbers = dict[str, list[float]]
Compared = list[tuple[Case, Numbers, Numbers]]

BATCHES = WHOLE | WITH_EMPTY | ON_A_HOLE
BY_ENERGY = ("optimal_token_baseline", "tir_optimal_token_baseline")
OF_GROUPS = {"gpg", "grpo", "grpo_passk", "grpo_vectorized", "reinforce_plus_plus_baseline", "rloo", "rloo_vectorized"}
TO_GO = {"gae", "reinforce_plus_plus", "remax", *BY_ENERGY}
ESTIMATORS = sorted({*OF_GROUPS, *TO_GO, "opo"})
APART = {"gdpo"}
"""The two sides read its components from other places: the kind `components`."""
DIVERGENCES = [name + plus for name in ("kl", "k1", "abs", "mse", "k2", "low_var_kl", "k3") for plus in ("", "+")]


def cases() -> Iterator[Case]:
    for batch in ROUNDED | NOT_FINITE:
        yield from (("estimator", batch, name, {}) for name in ESTIMATORS)
    for batch in BATCHES:
        yield from (("estimator", batch, name, {}) for name in ESTIMATORS)
        yield from (("estimator", batch, name, {}, True) for name in BY_ENERGY)
        undivided = {"norm_adv_by_std_in_grpo": False}
        yield from (("estimator", batch, name, undivided) for name in ("grpo", "grpo_passk", "grpo_vectorized"))
        discounted = {"gamma": 0.9, "lam": 0.8}
        yield from (("estimator", batch, name, discounted) for name in ("gae", "reinforce_plus_plus"))
        yield "estimator", batch, "reinforce_plus_plus", {"gamma": 0.5}
        yield from (("estimator", batch, "gae", {"gamma": gamma, "lam": lam}) for gamma, lam in ((1, 0), (0.5, 1)))
        weights = {"gdpo_reward_weights": [0.3, 2.0, 0.0]}
        yield from (("components", batch, options) for options in ({}, weights, undivided))
        yield from (("divergence", batch, name) for name in DIVERGENCES)
        for mode in LOSS_AGG_MODES:
            told = {"dp_size": 2, "batch_num_tokens": 50, "global_batch_size": 12}
            yield from (("aggregation", batch, mode, each) for each in ({}, {"loss_scale_factor": 100}, told))
            yield "aggregation", batch, mode, {}, True
            yield from (("value loss", batch, mode, clip) for clip in (0.5, 0.05, 10.0))
            yield from (("reinforce", batch, mode, weigh) for weigh in (False, True))
            yield "entropy loss", batch, mode
        yield from (
            ("redrawn", batch, *each) for each in (("pow", 2.0), ("pow", 0.5), ("max_min", 2.0), ("max_random", 2.0))
        )
        yield from (("whitening", batch, *each) for each in itertools.product((True, False), repeat=2))
        yield from (("kl in reward", batch, kind, name) for kind in ("adaptive", "fixed") for name in DIVERGENCES)
        yield from (("correction", batch, options) for options in corrections())


REFUSING = (
    "ValueError: Pass@k requires at least 2 samples",
    "ValueError: The sum of the mask is one",
    "ZeroDivisionError",
)
"""What verl says where ours goes on, each listed."""
SCHEDULES: tuple[Case, ...] = (
    ("schedule", "two groups", 4, None, {}),
    ("schedule", "two groups", 0, None, {}),
    *schedules(Random(1), 150),
)
BEYOND: Case = ("schedule", "two groups", 2, 6, {"min_lr_ratio": 0.1})
"""A schedule that has ended."""
UNSHIFTED: Case = ("schedule", "two groups", 4, None, {"zero_indexed_step": False})
FILTERS = [*groups(Random(2), 200)]


NAMES = ("names", "two groups")
DRAW = Random(0)
DRAWN = batches(DRAW, 40, empty=False)
DRAWN_WITH_EMPTY = batches(DRAW, 20, empty=True)
DRAWN_CASES = [
    *formula_cases(DRAW, DRAWN | DRAWN_WITH_EMPTY, rounds=2),
    *divergences_in_reward(DRAW, DRAWN, DIVERGENCES),
]


def corrections() -> Iterator[dict[str, Any]]:
    yield {}
    for level in ("token", "sequence"):
        for threshold in (2.0, "0.5_1.5"):
            for normalize in (False, True):
                yield {
                    "rollout_is": level,
                    "rollout_is_threshold": threshold,
                    "rollout_is_batch_normalize": normalize,
                }
    for name in REJECTIONS:
        bounds = ("0.5_1.5", "0.9_1.3", 1.2) if name.endswith("k1") else (0.1, 0.5)
        yield from ({"rollout_rs": name, "rollout_rs_threshold": each} for each in bounds)
    several = {"rollout_rs": "token_k3,seq_sum_k1", "rollout_rs_threshold": "0.2,0.5_2.0"}
    yield several
    yield several | {"rollout_is": "token", "rollout_is_threshold": "0.5_1.5"}
    yield {"rollout_rs": "seq_mean_k1", "rollout_rs_threshold": "0.95_1.02", "rollout_is": "sequence"}


@pytest.fixture(scope="module")
def both() -> Compared:
    """(case, verl's, ours) of every case."""
    every = [*cases(), *DRAWN_CASES, NAMES, *SCHEDULES, *FILTERS, UNSHIFTED, BEYOND]
    given = {"batches": BATCHES | ROUNDED | NOT_FINITE | DRAWN | DRAWN_WITH_EMPTY, "cases": every}
    verls, ours = (computed("score_formulas.py", given, folder) for folder in (VERL, OURS))
    return list(zip(every, verls, ours, strict=True))


def same(verls: Numbers, ours: Numbers) -> bool:
    """Of what both have. verl's deviations of equal numbers are rounding errors, not 0."""
    return "error" not in ours and all(
        ours[name] == pytest.approx(verls[name], rel=1e-4, abs=2e-3 if name.endswith("_std") else 5e-5, nan_ok=True)
        for name in ours
        if name in verls
    )


def chosen(both: Compared, kind: str, batches: dict[str, Any], *names: str) -> Compared:
    found = [one for one in both if one[0][0] == kind and one[0][1] in batches and (not names or one[0][2] in names)]
    assert found
    return found


def test_every_estimator_is_held_against_verl() -> None:
    own = {str(name) for name in ADV_ESTIMATOR_REGISTRY if ADV_ESTIMATOR_REGISTRY[name].__module__.startswith("verl.")}
    assert own == {*ESTIMATORS, *APART}


def test_every_public_name_of_verls_core_algos_is_here_or_told_what_to_write_instead(both: Compared) -> None:
    [(verls, ours)] = [(verls, ours) for case, verls, ours in both if case == NAMES]
    assert len(verls) > 40
    assert verls.keys() - ours.keys() <= NAMES_INSTEAD["verl.trainer.ppo.core_algos"].keys()


@pytest.mark.parametrize("name", ESTIMATORS)
def test_advantages_and_returns_of_an_estimator_are_verls(both: Compared, name: str) -> None:
    for case, verls, ours in chosen(both, "estimator", WHOLE, name):
        alone = name == "grpo_passk" and case[1] in ("a group of one", "groups in turns")
        assert "error" not in verls or alone, (case, verls)
        assert "error" in verls or same(verls, ours), (case, verls, ours)


def test_scores_that_are_no_finite_numbers_reach_the_advantages_as_in_verl(both: Compared) -> None:
    """A run ends before that: the reward manager refuses them."""
    for case, verls, ours in chosen(both, "estimator", NOT_FINITE):
        assert "error" not in verls, case
        assert same(verls, ours), (case, verls, ours)


def test_advantages_of_components_are_verls(both: Compared) -> None:
    for case, verls, ours in chosen(both, "components", WHOLE | ON_A_HOLE):
        assert "error" not in verls, (case, verls)
        assert same(verls, ours), (case, verls, ours)


@pytest.mark.parametrize("kind", ["estimator", "components", "aggregation", "value loss", "redrawn", "correction"])
def test_a_formula_is_verls_with_any_options(both: Compared, kind: str) -> None:
    """Also beside empty responses, where they move nothing or are not listed."""
    listed = {"components", "correction"}
    compared = chosen(both, kind, DRAWN if kind in listed else DRAWN | DRAWN_WITH_EMPTY)
    refused = 0
    for case, verls, ours in compared:
        if kind == "estimator" and case[1] in DRAWN_WITH_EMPTY and case[2] in {*OF_GROUPS, "opo"}:
            continue
        if "error" in verls:
            refused += 1
            assert verls["error"].startswith(REFUSING), (case, verls)
            assert "error" not in ours, (case, ours)
        else:
            assert ours.keys() == verls.keys(), case
            assert same(verls, ours), (case, verls, ours)
    assert len(compared) - refused >= 70


def test_a_batch_of_a_single_token_is_listed_with_the_reason(both: Compared) -> None:
    assert differences()["whitening of a single token"]["why"]
    found = [ours for _, verls, ours in both if verls.get("error", "").startswith(REFUSING[1])]
    assert found
    assert all(ours["advantages"] == [0.0] for ours in found)


@pytest.mark.parametrize("name", ["opo", "gdpo"])
def test_an_empty_response_leaves_no_group_where_one_with_tokens_is_left(both: Compared, name: str) -> None:
    assert name in differences()["baselines beside empty responses"]["why"]
    kind = ("components",) if name == "gdpo" else ("estimator", name)
    compared = chosen(both, kind[0], DRAWN_WITH_EMPTY, *kind[1:])
    differing = [case for case, verls, ours in compared if not same(verls, ours)]
    assert 0 < len(differing) < len(compared)


@pytest.mark.parametrize(
    "kind", ["divergence", "aggregation", "value loss", "whitening", "entropy loss", "reinforce", "redrawn"]
)
def test_a_formula_and_its_gradient_are_verls(both: Compared, kind: str) -> None:
    for case, verls, ours in chosen(both, kind, BATCHES):
        assert verls.keys() == ours.keys(), case
        assert "error" not in verls, case
        assert same(without_beside(verls), ours), (case, verls, ours)


def without_beside(numbers: Numbers) -> Numbers:
    return {name: number for name, number in numbers.items() if name != "beside"}


def test_what_whitening_leaves_beside_the_mask_is_listed_with_the_reason(both: Compared) -> None:
    assert differences()["`masked_whiten` beside the mask"]["why"]
    differing = 0
    for case, verls, ours in chosen(both, "whitening", BATCHES):
        assert set(ours["beside"]) <= {0.0}, case
        differing += ours["beside"] != verls["beside"]
    assert differing


@pytest.mark.parametrize("kind", ["kl in reward", "correction"])
def test_what_is_kept_its_weights_and_every_metric_that_has_verls_name_are_verls(both: Compared, kind: str) -> None:
    for case, verls, ours in chosen(both, kind, WHOLE | DRAWN if kind == "kl in reward" else WHOLE):
        assert ours.keys() == verls.keys(), case
        assert same(verls, ours), (case, verls, ours)


def test_the_tokens_that_are_kept_and_their_weights_are_verls_beside_empty_responses(both: Compared) -> None:
    for case, verls, ours in chosen(both, "correction", WITH_EMPTY):
        if not case[2].get("rollout_is_batch_normalize"):
            learned = [{name: one[name] for name in ("kept", "weights")} for one in (verls, ours)]
            assert same(*learned), case


@pytest.mark.parametrize("name", sorted(set(ESTIMATORS) - OF_GROUPS))
def test_an_empty_response_moves_no_estimator_without_means_of_groups(both: Compared, name: str) -> None:
    for case, verls, ours in chosen(both, "estimator", WITH_EMPTY, name):
        assert same(verls, ours), case


@pytest.mark.parametrize(
    ("difference", "kind", "batches", "names"),
    [
        ("baselines beside empty responses", "estimator", WITH_EMPTY, OF_GROUPS),
        ("KL in the reward beside empty responses", "kl in reward", WITH_EMPTY, {"adaptive", "fixed"}),
        ("advantages of equal scores", "estimator", ROUNDED, {"grpo", "grpo_vectorized"}),
        ("a score on a token that the policy did not write", "estimator", ON_A_HOLE, TO_GO),
    ],
)
def test_what_differs_on_purpose_is_listed_with_the_reason(
    both: Compared, difference: str, kind: str, batches: dict[str, Any], names: set[str]
) -> None:
    assert differences()[difference]["why"]
    differing = {case[2] for case, verls, ours in chosen(both, kind, batches) if not same(verls, ours)}
    assert differing == names


def test_the_learning_rate_of_every_step_is_verls(both: Compared) -> None:
    for case, verls, ours in both:
        assert case not in SCHEDULES or same(verls, ours), (case, verls, ours)


def test_a_warm_up_to_a_constant_rate_without_its_first_step_is_listed_with_the_reason(both: Compared) -> None:
    assert differences()["`optim.zero_indexed_step=false` with a constant rate"]["why"]
    verls, ours = both[-2][1:]
    assert ours["rates"][:-1] == verls["rates"][1:]


def test_dynamic_sampling_keeps_the_groups_that_verls_keeps_or_leaves_out_equal_ones(both: Compared) -> None:
    assert differences()["groups whose rewards are all equal"]["why"]
    differing = 0
    for case, verls, ours in chosen(both, "filter", WHOLE):
        equal = {number for number, of in enumerate(case[3]) if len(of) > 1 and len(set(of)) == 1}
        assert "error" not in verls, case
        assert set(ours["kept"]) == set(verls["kept"]) - equal == set(range(len(case[3]))) - equal, case
        differing += verls["kept"] != ours["kept"]
    assert 20 < differing < len(FILTERS)


def test_the_learning_rate_after_the_end_of_a_cosine_is_listed_with_the_reason(both: Compared) -> None:
    assert differences()["learning rate after `total_training_steps` of a cosine"]["why"]
    _, verls, ours = both[-1]
    assert ours["rates"][:7] == pytest.approx(verls["rates"][:7])
    assert ours["rates"][7:] == pytest.approx([0.1] * 3)
    assert verls["rates"][7] > 0.2


def test_metrics_of_the_correction_beside_empty_responses_are_listed_with_the_reason(both: Compared) -> None:
    assert differences()["`rollout_corr/*` beside empty responses"]["why"]
    for _, verls, ours in chosen(both, "correction", WITH_EMPTY):
        assert not math.isclose(verls["rollout_corr/training_ppl"][0], ours["rollout_corr/training_ppl"][0])


def test_pass_at_k_of_a_group_of_one_is_listed_with_the_reason(both: Compared) -> None:
    assert differences()["grpo_passk of a group of one"]["why"]
    found = chosen(both, "estimator", {"a group of one": None}, "grpo_passk")
    assert all("error" in verls and "error" not in ours for _, verls, ours in found)
