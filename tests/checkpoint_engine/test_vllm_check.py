"""What the check of an engine says about vLLM models that compute with the version, and about one that does not."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.checkpoint_engine.check_process import Tried
from tests.float8 import FLOAT8_ON_CPU, NEEDS_FLOAT8
from tests.warm_workers import PATIENCE_S, WarmWorkers, written_by
from verl.checkpoint_engine.engines.vllm.reports import take_reports, write_report
from verl.checkpoint_engine.errors import IntegrityError
from verl.checkpoint_engine.plan.types import EngineCheckResult
from verl.utils.builtin import make_tiny_model

Activations = dict[str, list[Tried]]


@pytest.fixture(scope="module")
def tried(tmp_path_factory: pytest.TempPathFactory, warm: WarmWorkers) -> Activations:
    """By case, one for each version."""
    directory = tmp_path_factory.mktemp("check")
    models = [make_tiny_model(directory / "model", "llama")]
    if FLOAT8_ON_CPU:
        models.append(make_tiny_model(directory / "quantizable", "llama", hidden_size=256, dtype="bfloat16"))
    written = written_by(warm, "tests.checkpoint_engine.check_process", *models)
    cases: Activations = {}
    for one in json.loads(written.splitlines()[-1]):
        cases.setdefault(one["case"], []).append(Tried(**one))
    return cases


@pytest.mark.vllm
def test_a_model_with_a_copy_that_the_loader_does_not_refresh_is_loaded_as_from_disk_in_every_version(
    tried: Activations,
):
    for mode in ("first", "always"):
        for activation in tried[f"forgetful {mode}"]:
            assert activation.error is None
            assert "1 tensors of ForgetfulLlama" in activation.message
            assert "model.packed has values from before" in activation.message
            assert activation.message.endswith(
                "every version is loaded as from disk, into a second model, which takes longer and needs its memory"
            )
            assert not activation.is_stale


@pytest.mark.vllm
def test_a_copy_that_the_loader_refreshes_no_more_is_caught_at_every_version(tried: Activations):
    right, wrong = tried["forgetful later"]
    assert right.error is None
    assert wrong.error == "IntegrityError"
    assert "model.packed has values from before" in wrong.message


@pytest.mark.vllm
def test_a_right_model_passes_and_says_what_was_compared(tried: Activations):
    for mode in ("first", "always"):
        first, second = tried[f"plain {mode}"]
        assert first.error is second.error is None
        assert first.message.endswith("live tensors equal a load from disk")
        assert 0 < first.seconds < PATIENCE_S
        assert bool(second.message) == (mode == "always")
    assert "written anew" in tried["plain always"][1].message


@pytest.mark.vllm
def test_nothing_is_looked_at_when_the_check_is_off(tried: Activations):
    for kind in ("plain", "forgetful"):
        assert [(activation.error, activation.message) for activation in tried[f"{kind} off"]] == [(None, "")] * 2


@pytest.mark.vllm
def test_where_a_second_model_does_not_fit_the_report_says_so_and_less_is_checked(tried: Activations):
    (activation,) = tried["without memory"]
    assert activation.error is None
    assert "were written anew; not compared with a load from disk: a second model needs" in activation.message


@pytest.mark.vllm
@NEEDS_FLOAT8
def test_a_quantized_model_is_compared_with_one_that_was_quantized_as_from_disk(tried: Activations):
    first, second = tried["float8 first"]
    assert first.error is second.error is None
    assert first.message.endswith("live tensors equal a load from disk")


@pytest.mark.vllm
@NEEDS_FLOAT8
def test_a_quantized_tensor_of_the_version_before_is_found(tried: Activations):
    for mode in ("first", "always"):
        for activation in tried[f"float8 forgetful {mode}"]:
            assert activation.error is None
            assert "2 tensors of ForgetfulLlama" in activation.message
            assert "model.projection has values from before" in activation.message
            assert not activation.is_stale


@pytest.mark.vllm
@NEEDS_FLOAT8
def test_a_quantized_model_that_cannot_be_compared_serves_nothing(tried: Activations):
    (activation,) = tried["float8 without memory"]
    assert activation.error == "ActivationError"
    assert "comparison with a load from disk before it serves: a second model needs" in activation.message


def test_a_server_tells_the_longest_time_of_its_ranks_once(tmp_path: Path):
    for rank, seconds in enumerate((0.1, 0.3)):
        write_report(tmp_path, rank, EngineCheckResult(seconds=seconds, found=f"rank {rank}"), None)
    assert take_reports(tmp_path, 7) == EngineCheckResult(seconds=0.3, found="rank 0")
    assert take_reports(tmp_path, 8) is None


def test_a_rank_that_differs_is_named_with_its_tensors(tmp_path: Path):
    write_report(tmp_path, 0, EngineCheckResult(seconds=0.1, found="all equal"), None)
    write_report(tmp_path, 1, None, IntegrityError("lm_head.weight differs"))
    with pytest.raises(IntegrityError, match="rank 1: lm_head.weight differs"):
        take_reports(tmp_path, 7)
