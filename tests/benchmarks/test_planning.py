"""The planning benchmark runs, and its result says everything; how fast it is, is not tested here."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.planning import STEPS, main, mixture_of_experts


def test_a_small_model_is_planned_for_both_cases(tmp_path: Path):
    arguments = ["--layers", "3", "--experts", "4", "--trainers", "8", "--replicas", "2", "--output", str(tmp_path)]
    assert main(arguments) == 0
    result = json.loads((tmp_path / "result.json").read_text())
    assert result["benchmark"] == "planning"
    specs = mixture_of_experts(3, 4)
    nbytes = sum(spec.nbytes for spec in specs)
    for case in result["cases"]:
        assert case["tensors"] == len(specs)
        assert case["seconds"].keys() == case["peak_growth_gib"].keys() == STEPS.keys()
        assert case["owner_nbytes"]["least"] * 8 <= nbytes <= case["owner_nbytes"]["most"] * 8
    assert {case["case"] for case in result["cases"]} == {"fsdp2", "expert_parallel_replicated"}


def test_the_model_has_a_trillion_parameters():
    specs = mixture_of_experts(61, 384)
    assert sum(spec.numel for spec in specs) == pytest.approx(1e12, rel=0.05)
    assert len({spec.name for spec in specs}) == len(specs) == pytest.approx(70_000, rel=0.01)


def test_ranks_that_are_no_multiple_of_the_replicas_are_refused(capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit):
        main(["--trainers", "9"])
    assert "--trainers 9 must be a multiple of --replicas 8" in capsys.readouterr().err
