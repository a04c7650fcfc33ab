"""`--backend all` measures every backend and what others do; how fast they are, is not tested here."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.comparison import targets
from benchmarks.peers import digests_of, require_equal
from benchmarks.weight_sync import main
from verl.checkpoint_engine.errors import IntegrityError

RUNNING = {"naive", "gloo", "tcp", "nixl", "mooncake", "kimi_ckpt_engine"}
ROOT = Path(__file__).parents[2]
PEERS = {"gathered broadcast", "safetensors in shm", "ray object store"}


@pytest.fixture(scope="module")
def result(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """In a process of its own: the benchmark starts a Ray, and other tests leave this process connected to theirs."""
    output = tmp_path_factory.mktemp("comparison")
    arguments = ["--backend", "all", "--size-gib", "0.004", "--repeats", "1", "--trainers", "1", "--nodes", "1"]
    command = [sys.executable, "-m", "benchmarks.weight_sync", *arguments, "--output", str(output)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=600)
    assert done.returncode == 0, done.stderr
    assert (output / "plot.png").read_bytes().startswith(b"\x89PNG")
    return json.loads((output / "result.json").read_text())


@pytest.mark.cells(3, by="result")
def test_every_backend_is_measured_beside_its_library_or_said_to_be_missing(result: Any):
    assert result["backends"].keys() | result["unavailable"].keys() == RUNNING
    assert {"naive", "gloo"} <= result["backends"].keys()
    for measured in result["backends"].values():
        (sample,) = measured["samples"]
        assert all(sample[key] > 0 for key in ("raw_gbytes_per_s", "transfer_s", "blocked_s", "verify_s"))
        assert sample["total_s"] >= sample["publish_s"] + sample["verify_s"]


@pytest.mark.cells(3, by="result")
def test_the_ways_of_others_are_measured_on_the_same_bytes(result: Any):
    assert result["peers"].keys() == PEERS
    for measured in result["peers"].values():
        assert 0 < measured["summary"]["blocked_s"] <= measured["summary"]["total_s"]


@pytest.mark.cells(3, by="result")
def test_every_target_has_a_value_and_a_verdict(result: Any):
    for name, found in result["targets"].items():
        stages = set() if name == "naive" else {"stage_of_raw", "verify_of_stage"}
        assert found.keys() == {"blocked_shorter_by", *stages}


@pytest.mark.parametrize(
    ("of_raw", "of_stage", "blocked_s", "reached"),
    [(0.9, 0.14, 0.1, [True, True, True]), (0.89, 0.15, 0.101, [False, False, False])],
)
def test_a_target_is_reached_from_its_bound_on(of_raw: float, of_stage: float, blocked_s: float, reached: list[bool]):
    summary = {"transfer_of_raw": of_raw, "verify_of_transfer": of_stage, "blocked_s": blocked_s}
    peers = {"gathered broadcast": {"summary": {"blocked_s": 2.0}}}
    found = targets({"gloo": {"summary": summary}}, peers, nodes=1)["gloo"]
    assert [found[key]["reached"] for key in ("stage_of_raw", "verify_of_stage", "blocked_shorter_by")] == reached


def test_a_node_with_other_bytes_than_the_rank_that_sent_them_fails_the_benchmark():
    sent = digests_of({"weight": torch.arange(6, dtype=torch.int32).view(3, 2)}, trainers=2)
    changed = torch.arange(6, dtype=torch.int32).view(3, 2)
    changed[2, 1] = 7
    require_equal("some way", [sent], [sent])
    with pytest.raises(IntegrityError, match="some way: node 1 has other bytes in weight from row 2"):
        require_equal("some way", [sent], [sent, digests_of({"weight": changed}, trainers=2)])


def test_what_does_not_fit_into_memory_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    assert main(["--backend", "all", "--size-gib", "100000", "--output", str(tmp_path)]) == 2
    assert "GiB of memory" in capsys.readouterr().err
