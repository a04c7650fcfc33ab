"""What rounding may do to log-probs, and what a missing tensor may not."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from verl.checkpoint_engine.conformance.command import prompts_of
from verl.checkpoint_engine.conformance.distance import TOLERANCES, Tolerance
from verl.checkpoint_engine.conformance.oracle import MARGIN, Oracle, changed_version, load_model
from verl.utils.builtin import make_tiny_model

COARSE = TOLERANCES["bfloat16"]


def plain_mean(differences: list[float], in_a_row: int) -> float:
    """The definition, in a loop."""
    length = min(in_a_row, len(differences))
    return max(sum(differences[at : at + length]) / length for at in range(len(differences) - length + 1))


@pytest.mark.parametrize("in_a_row", [1, 3, 24])
@pytest.mark.parametrize("length", [1, 12, 170])
def test_the_distance_is_the_largest_mean_over_tokens_in_a_row(length, in_a_row):
    found, expected = torch.randn(2, length, generator=torch.Generator().manual_seed(length))
    differences = (found - expected).abs().tolist()
    assert Tolerance(1.0, in_a_row).away(found, expected) == pytest.approx(plain_mean(differences, in_a_row))


@pytest.mark.parametrize("tolerance", TOLERANCES.values(), ids=str)
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_what_is_no_number_is_not_let_pass(value, tolerance):
    found = torch.zeros(170)
    assert tolerance.allows(found, torch.zeros(170))
    found[100] = value
    assert not tolerance.allows(found, torch.zeros(170))


def test_one_token_that_rounding_moves_far_is_let_pass_and_a_few_of_another_version_are_not():
    found = torch.full((160,), 0.02)
    found[80] = 0.5  # the largest difference of an answer of gemma4_text in vLLM
    assert COARSE.allows(found, torch.zeros(160))
    found[-4:] = 0.8
    assert not COARSE.allows(found, torch.zeros(160))


@pytest.mark.parametrize("architecture", ["qwen2", "qwen3"])
def test_an_engine_that_computes_in_bfloat16_has_its_version_and_each_missing_tensor_is_named(architecture, tmp_path):
    model, other = make_tiny_model(tmp_path / "A", architecture), tmp_path / "B"
    oracle, _ = changed_version(model, other, prompts_of(250, 48), "bfloat16", COARSE, lambda _: None)
    assert COARSE.allows(computed(other, {}, oracle), oracle.of_new)
    assert COARSE.allows(computed(model, {}, oracle), oracle.of_old)
    old = load_model(model, "bfloat16").state_dict()
    seen = [name for name, effect in oracle.power(COARSE).items() if effect > MARGIN * COARSE.nats]
    assert len(seen) > 0.8 * len(oracle.parts)
    for name in seen:
        found = computed(other, {name: old[name]}, oracle)
        assert not COARSE.allows(found, oracle.of_new), name
        what = oracle.explain(found, COARSE)
        assert (what.fault, what.parts) == ("partly loaded", (name,))


def computed(directory: Path, instead: dict[str, torch.Tensor], oracle: Oracle) -> torch.Tensor:
    """The log-probs of an engine that loaded `directory`, but for `instead`."""
    engine = load_model(directory, "bfloat16")
    engine.load_state_dict(instead, strict=False)
    engine = engine.bfloat16()
    return Oracle(engine, engine, oracle.prompts).of_new
