"""The benchmark between hosts runs, and its result says everything; how fast they are, is not tested here."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.hosts import WAYS, main
from benchmarks.namespaces import NotPermitted, joined_hosts
from benchmarks.peers import BASELINE
from tests.checkpoint_engine.backends import PACKAGES

CHOSEN = ("gloo", "nixl-chain")


@pytest.fixture(scope="module")
def result(tmp_path_factory: pytest.TempPathFactory) -> Any:
    try:
        with joined_hosts(1, gbit_per_s=1):
            pass
    except NotPermitted as exc:
        pytest.skip(str(exc))
    output = tmp_path_factory.mktemp("hosts")
    arguments = ["--ways", *CHOSEN, "--size-gib", "0.004", "--nodes", "2", "1", "--repeats", "1"]
    assert main([*arguments, "--gbit-per-s", "2", "--output", str(output)]) == 0
    assert (output / "plot.png").read_bytes().startswith(b"\x89PNG")
    return json.loads((output / "result.json").read_text())


@pytest.mark.cells(3, by="result")
def test_every_way_is_measured_beside_plain_tcp_and_the_gathered_broadcast(result: Any):
    assert [fleet["nodes"] for fleet in result["fleets"]] == [1, 2]
    for fleet in result["fleets"]:
        assert 0 < fleet["tcp_gbit_per_s"] < 4  # a link of 2 lets the first megabyte through at once
        assert fleet["ways"].keys() | result["unavailable"].keys() == {*CHOSEN, BASELINE}
        for measured in fleet["ways"].values():
            (sample,) = measured["samples"]
            assert 0 < sample["blocked_s"] <= sample["total_s"]


@pytest.mark.cells(3, by="result")
def test_the_link_of_the_trainers_host_counts_what_it_sends(result: Any):
    two = result["fleets"][1]["ways"]
    for name in {*CHOSEN} & two.keys():
        assert 1 <= two[name]["summary"]["sent_in_models"] < 1.3
    assert 2 <= two[BASELINE]["summary"]["sent_in_models"] < 2.5


def test_every_backend_that_crosses_hosts_is_among_the_ways():
    assert {way["backend"] for way in WAYS.values()} == PACKAGES.keys() - {"naive"}


def test_a_model_that_does_not_fit_into_memory_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    assert main(["--size-gib", "100000", "--output", str(tmp_path)]) == 2
    assert "GiB are available" in capsys.readouterr().err
