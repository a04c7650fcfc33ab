"""Sampling of responses against PyPI's verl: what a run's options ask of an engine, in training and in validation."""

from __future__ import annotations

import json
from random import Random
from typing import Any

import pytest

from tests.originals.original import VERL, computed, differences
from verl.trainer.config.checks.algorithms import warnings
from verl.trainer.config.loader import load_config
from verl.workers.rollout.records import NEUTRAL, SamplingOptions

ROLLOUT = "actor_rollout_ref.rollout"
Case = tuple[dict[str, Any], bool]


def case(draw: Random) -> Case:
    options: dict[str, Any] = {}
    for section, coldest in ((ROLLOUT, 0.5), (f"{ROLLOUT}.val_kwargs", 0.0)):
        drawn = {
            "temperature": draw.choice((coldest, 1.0, 1.3)),
            "top_p": draw.choice((0.3, 0.9, 1.0)),
            "top_k": draw.choice((-1, 5, 50)),
            "do_sample": draw.random() < 0.7,
        }
        options |= {f"{section}.{key}": value for key, value in drawn.items() if draw.random() < 0.6}
    options[f"{ROLLOUT}.calculate_log_probs"] = draw.random() < 0.5
    return options, draw.random() < 0.5


CASES = [case(Random(number)) for number in range(40)]


def greedy(given: Case) -> bool:
    options, validate = given
    if validate:
        return not options.get(f"{ROLLOUT}.val_kwargs.do_sample", False)
    return not options.get(f"{ROLLOUT}.do_sample", True)


@pytest.fixture(scope="module")
def both() -> list[tuple[Case, dict[str, Any], Any]]:
    """(case, what verl asks for, our configuration)."""
    verls = computed("sample_options.py", CASES, VERL)
    ours = [load_config([f"{key}={json.dumps(value)}" for key, value in options.items()]) for options, _ in CASES]
    return list(zip(CASES, verls, ours, strict=True))


def asked(config: Any, given: Case) -> dict[str, Any]:
    make = SamplingOptions.for_validation if given[1] else SamplingOptions.for_training
    return make(config.actor_rollout_ref.rollout, max_tokens=1).as_dict()


def test_responses_are_sampled_as_verls(both: Any) -> None:
    compared = 0
    for given, verls, config in both:
        own = asked(config, given)
        if greedy(given):
            continue
        compared += 1
        assert {name: own[name] for name in ("temperature", "top_p", "top_k")} == {
            name: verls[name] for name in ("temperature", "top_p", "top_k")
        }, given
        assert {name: value for name, value in verls.items() if name not in own}.items() <= NEUTRAL.items()
        if not given[1]:  # nobody reads those of a validation
            assert own["logprobs"] == verls["logprobs"], given
    assert compared > 15


def test_what_do_sample_does_is_listed_with_the_reason_and_warned_of(both: Any) -> None:
    assert differences()["`do_sample=false`"]["why"]
    for given, verls, config in both:
        own = asked(config, given)
        if greedy(given):
            assert own["temperature"] == 0.0, given
        if given[1] and greedy(given):
            warned = any("verl 0.9 samples" in said for said in warnings(config))
            assert warned == (verls["temperature"] > 0), given
