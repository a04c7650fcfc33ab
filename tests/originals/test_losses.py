"""Policy losses against PyPI's verl: value, gradient and metrics on the same ragged batches."""

from __future__ import annotations

import itertools
from random import Random
from typing import Any

import pytest
import torch

from tests.originals.batches import WHOLE, WITH_EMPTY, Batch
from tests.originals.draws import NEEDED, batches, loss_options
from tests.originals.original import OURS, VERL, computed, differences
from verl.workers.config import ActorConfig
from verl.workers.losses.policy import POLICY_LOSS_REGISTRY

LOSSES = ("vanilla", "gspo", "geo_mean", "gpg", "sapo", "cispo", "clip_cov", "kl_cov", "dppo_tv", "dppo_kl", "dro")
MODES = ("token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm")
LENGTHS = (9, 4, 1, 7, 2, 5)
OURS_ALONE = {("kl_cov", "actor/kl_cov_frac"), ("clip_cov", "actor/pg_clipfrac_lower")}
"""Metrics that verl does not report."""


def batch(seed: int) -> dict[str, list[list[float]]]:
    """Log-probs, advantages, a mask with ragged ends and a hole, and importance weights, each [6, 9].

    Two ratios are 12: above `clip_ratio_c`, one with an advantage of each sign.
    """
    draw = torch.Generator().manual_seed(seed)
    rows, columns = len(LENGTHS), max(LENGTHS)
    old = -torch.rand(rows, columns, generator=draw) * 2 - 0.05
    new = (old + torch.randn(rows, columns, generator=draw) * 0.8).clamp(max=-0.01)
    advantages = torch.randn(rows, 1, generator=draw)
    old[:2, 0], new[:2, 0], advantages[:2, 0] = -2.5, -0.02, torch.tensor([1.0, -1.0])
    mask = (torch.arange(columns) < torch.tensor(LENGTHS).unsqueeze(-1)).float()
    mask[3, 2], advantages[5] = 0.0, 0.0
    return {
        "old_log_prob": old.tolist(),
        "log_prob": new.tolist(),
        "advantages": advantages.expand(rows, columns).tolist(),
        "response_mask": mask.tolist(),
        "weights": (torch.rand(rows, columns, generator=draw) + 0.5).tolist(),
    }


def with_advantages(given: dict[str, Batch]) -> dict[str, Any]:
    tensors = ("old_log_prob", "log_prob", "advantages", "response_mask", "weights")
    return {
        name: {key: one["values" if key == "advantages" else key] for key in tensors} for name, one in given.items()
    }


BATCHES = {str(seed): batch(seed) for seed in range(3)} | with_advantages(WHOLE | WITH_EMPTY)
FAR = "a ratio of e^25"
BATCHES[FAR] = batch(3)
BATCHES[FAR]["old_log_prob"][0][1], BATCHES[FAR]["log_prob"][0][1] = -26.0, -1.0
RANGES = {"clip_ratio_low": 0.1, "clip_ratio_high": 0.3, "clip_ratio_c": 1.5}
TEMPERATURES = {"tau_pos": 2.0, "tau_neg": 0.5}
OF_LOSSES = {"clip_cov_lb": 0.01, "clip_cov_ub": 0.4, "kl_cov_ratio": 0.3, "ppo_kl_coef": 0.5, "dro_beta": 1.2}
OF_GEO_MEAN = {("geo_mean", name) for name in WITH_EMPTY}
CLAMPED = {(loss, FAR) for loss in ("geo_mean", "clip_cov", "kl_cov")}
"""(loss, batch) that differ on purpose."""
DEFAULTS, OTHERS = "defaults", "other options"
OF_VERL = {
    DEFAULTS: (NEEDED, {"dro_beta": 0.3}),
    OTHERS: (NEEDED | RANGES | TEMPERATURES, OF_LOSSES),
}
OF_OURS = {DEFAULTS: ({}, {"dro_beta": 0.3}), OTHERS: (RANGES, OF_LOSSES | TEMPERATURES)}
DRAW = Random(0)
DRAWN = with_advantages(batches(DRAW, 40, empty=False) | batches(DRAW, 20, empty=True))
OPTIONS = {f"drawn {number}": loss_options(DRAW) for number in range(1500)}
DRAWN_CASES = [(name, *(DRAW.choice(each) for each in ([*DRAWN], LOSSES, MODES, (False, True)))) for name in OPTIONS]

Case = tuple[str, str, str, str, bool]
Compared = list[tuple[Case, dict[str, Any], dict[str, Any]]]


@pytest.fixture(scope="module")
def every() -> Compared:
    """(case, verl's, ours) of fixed options and of drawn ones."""
    cases = [*itertools.product(OF_VERL, BATCHES, LOSSES, MODES, (False, True)), *DRAWN_CASES]
    totals = {name: options.totals for name, options in OPTIONS.items()}
    given = {"batches": BATCHES | DRAWN, "cases": cases, "totals": totals}
    of_verl = OF_VERL | {name: options.verls for name, options in OPTIONS.items()}
    of_ours = OF_OURS | {name: options.ours for name, options in OPTIONS.items()}
    verls = computed("score_losses.py", given | {"configs": of_verl}, VERL)
    ours = computed("score_losses.py", given | {"configs": of_ours}, OURS)
    return list(zip(cases, verls, ours, strict=True))


@pytest.fixture(scope="module")
def both(every: Compared) -> Compared:
    """Every batch, loss, aggregation, with and without importance weights."""
    return [one for one in every if one[0][0] in OF_VERL]


@pytest.fixture(scope="module")
def drawn(every: Compared) -> Compared:
    return [one for one in every if one[0][0] in OPTIONS]


def test_every_loss_is_held_against_verl() -> None:
    own = {str(name) for name, loss in POLICY_LOSS_REGISTRY.items() if loss.__module__.startswith("verl.")}
    assert own == set(LOSSES)


def test_both_have_the_same_clip_range_by_default() -> None:
    config = ActorConfig()
    assert (config.clip_range, config.clip_ratio_c) == ((0.2, 0.2), 3.0)


@pytest.mark.parametrize("loss", LOSSES)
def test_a_policy_loss_and_its_gradient_are_verls(both: list[Any], loss: str) -> None:
    compared = [(case, verls, ours) for case, verls, ours in both if case[2] == loss]
    assert len(compared) == 2 * len(BATCHES) * 2 * len(MODES)
    for case, verls, ours in compared:
        if (loss, case[1]) not in OF_GEO_MEAN | CLAMPED:
            assert ours["loss"] == pytest.approx(verls["loss"], abs=1e-5), case
            assert ours["gradient"] == pytest.approx(verls["gradient"], abs=1e-5), case


def test_what_geo_mean_divides_by_beside_empty_responses_is_listed_with_the_reason(both: list[Any]) -> None:
    assert differences()["geo_mean beside empty responses"]["why"]
    for case, verls, ours in both:
        if (case[2], case[1]) in OF_GEO_MEAN:
            assert 4 * ours["loss"] == pytest.approx(6 * verls["loss"], abs=1e-4), case  # two of six are empty


def test_the_losses_whose_ratios_are_bounded_here_alone_are_listed_with_the_reason(both: list[Any]) -> None:
    assert differences()["ratios above e^20 in geo_mean, clip_cov and kl_cov"]["why"]
    far = [(case[2], verls["metrics"], ours["metrics"]) for case, verls, ours in both if case[1] == FAR]
    name = "actor/ppo_kl"
    told = [(loss, verls[name], ours[name]) for loss, verls, ours in far if name in ours]
    assert {(loss, FAR) for loss, verls, ours in told if ours != pytest.approx(verls, abs=1e-5)} == CLAMPED


@pytest.mark.parametrize("loss", LOSSES)
def test_a_policy_loss_its_gradient_and_its_metrics_are_verls_with_any_options(drawn: Compared, loss: str) -> None:
    compared = 0
    for case, verls, ours in drawn:
        name, batch, of_case, *_ = case
        totals = OPTIONS[name].totals
        if of_case != loss or (loss == "geo_mean" and (batch.endswith("empty") or "num_tokens" in totals)):
            continue
        compared += 1
        assert ours["loss"] == pytest.approx(verls["loss"], rel=1e-5, abs=1e-5), (case, OPTIONS[name])
        assert ours["gradient"] == pytest.approx(verls["gradient"], rel=1e-5, abs=1e-5), (case, OPTIONS[name])
        if "num_tokens" not in totals:  # else metrics are shares of the mini-batch's here
            told = {key: value for key, value in ours["metrics"].items() if (loss, key) not in OURS_ALONE}
            expected = {key: verls["metrics"].get(key) for key in told}
            assert told == pytest.approx(expected, rel=1e-5, abs=1e-5), (case, OPTIONS[name])
    assert compared > 30


def test_what_geo_mean_of_a_micro_batch_is_divided_by_is_listed_with_the_reason(drawn: Compared) -> None:
    assert differences()["geo_mean over several micro-batches"]["why"]
    compared = 0
    for case, verls, ours in drawn:
        if case[2] == "geo_mean" and not case[1].endswith("empty") and "num_sequences" in OPTIONS[case[0]].totals:
            compared += 1
            rows = len(DRAWN[case[1]]["response_mask"])
            of_all = OPTIONS[case[0]].totals["num_sequences"]
            assert of_all * ours["loss"] == pytest.approx(rows * verls["loss"], rel=1e-5, abs=1e-5), case
    assert compared > 20


@pytest.mark.parametrize("loss", LOSSES)
def test_a_metric_of_a_policy_loss_that_has_verls_name_has_its_value(both: list[Any], loss: str) -> None:
    for case, verls, ours in both:
        if case[2] == loss and (loss, case[1]) not in CLAMPED:
            shared = {key: value for key, value in ours["metrics"].items() if (loss, key) not in OURS_ALONE}
            assert shared == pytest.approx({key: verls["metrics"].get(key) for key in shared}, abs=1e-5), case
