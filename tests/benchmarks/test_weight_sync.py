"""The benchmark runs, and its result says everything; how fast it is, is not tested here."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.synthetic_model import qwen_like_specs
from benchmarks.weight_sync import main

TINY = ["--size-gib", "0.004", "--repeats", "2", "--trainers", "2"]


@pytest.fixture(scope="module")
def result(tmp_path_factory: pytest.TempPathFactory) -> Any:
    output = tmp_path_factory.mktemp("benchmark")
    arguments = [*TINY, "--nodes", "2", "--replicas", "2", "--source-dtype", "float32", "--output", str(output)]
    assert main(arguments) == 0
    assert (output / "plot.png").read_bytes().startswith(b"\x89PNG")
    return json.loads((output / "result.json").read_text())


@pytest.mark.cells(3, by="result")
def test_the_result_says_what_was_measured_on_what(result: Any):
    assert result["benchmark"] == "weight_sync"
    assert result["settings"]["backend"] == "naive"
    assert result["settings"]["source_dtype"] == "float32"
    assert {"processor", "cores", "memory_gib", "load_average_1min", "torch"} <= set(result["machine"])
    assert result["model"]["nbytes"] == pytest.approx(0.004 * 2**30, rel=0.01)


@pytest.mark.cells(3, by="result")
def test_the_result_holds_every_sample_with_the_memcpy_measured_beside_it(result: Any):
    assert [sample["version"] for sample in result["samples"]] == [2, 3]
    keys = {"memcpy_gbytes_per_s", "publish_s", "stage_s", "verify_s", "commit_s", "activate_s", "trainer_blocked_s"}
    for sample in result["samples"]:
        assert all(sample[key] > 0 for key in keys - {"stage_s"})
        assert sample["trainer_blocked_s"] <= sample["publish_s"]


@pytest.mark.cells(3, by="result")
def test_the_summary_gives_seconds_rate_and_fraction_of_every_part(result: Any):
    summary = result["summary"]
    for part in ("publish_and_stage", "verify", "publish_stage_verify", "activate_by_copying", "trainer_blocked"):
        assert set(summary[part]) == {"seconds", "gbytes_per_s", "fraction_of_memcpy"}
    assert summary["target_fraction"] == 0.6
    fractions = [summary[part]["fraction_of_memcpy"] for part in ("publish_stage_verify", "trainer_blocked")]
    assert summary["target_reached"] == (min(fractions) >= 0.6)


def test_the_target_of_naive_is_not_held_against_other_backends(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    assert main([*TINY, "--backend", "gloo", "--output", str(tmp_path)]) == 0
    assert "target_reached" not in json.loads((tmp_path / "result.json").read_text())["summary"]
    printed = capsys.readouterr().out
    assert "--backend all" in printed
    assert "reached" not in printed


@pytest.mark.cells(3, by="result")
def test_shared_memory_is_two_models_per_node_whatever_the_number_of_replicas_and_is_given_back(result: Any):
    assert result["shared_memory"]["per_node_in_models"] == pytest.approx(2, rel=0.05)
    assert result["shared_memory"]["left_after_close_nbytes"] == 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--size-gib", "100000"], "GiB of memory"),
        (["--backend", "naiv"], "Did you mean 'naive'?"),
    ],
)
def test_what_cannot_run_here_is_an_error_and_not_a_traceback(
    arguments: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    assert main([*arguments, "--output", str(tmp_path)]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("nbytes", [2**20, 2**24, 2**30, 15 * 2**30])
def test_the_synthetic_model_has_the_size_that_was_asked_for_and_the_names_of_a_checkpoint(nbytes: int):
    specs = qwen_like_specs(nbytes, "bfloat16")
    assert sum(spec.nbytes for spec in specs) == pytest.approx(nbytes, rel=0.02)
    assert {"model.embed_tokens.weight", "model.layers.0.mlp.gate_proj.weight"} <= {spec.name for spec in specs}
    assert len({spec.name for spec in specs}) == len(specs)
