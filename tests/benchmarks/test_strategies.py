"""Every training engine is measured beside the vanilla way; how fast they are, is not tested here."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.strategies import main, require_same
from verl.checkpoint_engine.errors import IntegrityError

STRATEGIES = ["fsdp", "fsdp2", "megatron"]


@pytest.fixture(scope="module")
def result(tmp_path_factory: pytest.TempPathFactory) -> Any:
    output = tmp_path_factory.mktemp("strategies")
    assert main(["--size-mib", "2", "--repeats", "2", "--output", str(output)]) == 0
    assert (output / "plot.png").read_bytes().startswith(b"\x89PNG")
    return json.loads((output / "result.json").read_text())


@pytest.mark.cells(3, by="result")
def test_every_engine_is_measured_beside_the_vanilla_way(result: Any):
    assert result["settings"]["backend"] == "naive"
    assert {"processor", "cores", "memory_gib", "torch"} <= set(result["machine"])
    assert result["model"]["nbytes"] == pytest.approx(2 * 2**20, rel=0.3)
    assert list(result["strategies"]) == STRATEGIES
    for measured in result["strategies"].values():
        assert [sample["version"] for sample in measured["samples"]] == [2, 3]
        for sample in measured["samples"]:
            assert 0 < sample["blocked_s"] <= sample["total_s"]
            assert sample["vanilla_s"] > 0
            assert sample["forward_s"] > 0


@pytest.mark.cells(3, by="result")
def test_the_verdict_is_that_of_the_medians(result: Any):
    for measured in result["strategies"].values():
        summary = measured["summary"]
        assert summary["shorter_by"] == pytest.approx(summary["vanilla_s"] / summary["blocked_s"])
        assert summary["target_reached"] == (summary["shorter_by"] >= result["target"] == 20)


@pytest.mark.cells(3, by="result")
def test_all_engines_deliver_the_same_bytes_either_way(result: Any):
    """Each compares the two ways in every round, or fails; they began with the same model and took the same steps."""
    assert len({measured["digest"] for measured in result["strategies"].values()}) == 1


def test_a_receiver_with_other_bytes_than_the_replica_fails_the_benchmark():
    synced = {"weight": torch.arange(6, dtype=torch.bfloat16).view(3, 2)}
    received = {"weight": synced["weight"].clone()}
    require_same("fsdp2", synced, received)
    received["weight"][2, 1] = 7
    with pytest.raises(IntegrityError, match="fsdp2, vanilla: node 0 has other bytes in weight"):
        require_same("fsdp2", synced, received)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [(["--size-mib", "1e9"], "GiB of memory"), (["--backend", "naiv"], "Did you mean 'naive'?")],
)
def test_what_cannot_run_here_is_an_error_and_not_a_traceback(
    arguments: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    assert main([*arguments, "--output", str(tmp_path)]) == 2
    assert message in capsys.readouterr().err
