"""The benchmark of deltas runs, and its result says everything; how fast they are, is not tested here."""

from __future__ import annotations

import json
from typing import Any

import pytest

from benchmarks.deltas import main
from benchmarks.namespaces import NotPermitted, joined_hosts


@pytest.fixture(scope="module")
def result(tmp_path_factory: pytest.TempPathFactory) -> Any:
    try:
        with joined_hosts(1, gbit_per_s=1):
            pass
    except NotPermitted as exc:
        pytest.skip(str(exc))
    output = tmp_path_factory.mktemp("deltas")
    sizes = ["--gbit-per-s", "0", "1", "--nodes", "1", "--size-mib", "4", "--repeats", "1"]
    assert main(["--learning-rates", "1e-5", *sizes, "--output", str(output)]) == 0
    assert (output / "plot.png").read_bytes().startswith(b"\x89PNG")
    return json.loads((output / "result.json").read_text())


@pytest.mark.cells(3, by="result")
def test_sizes_and_rates_are_measured_on_what_an_optimizer_changed(result: Any):
    (row,) = result["codec"]
    assert 0 < row["changed_fraction"] < 1
    assert 1 < row["bits_per_change"] < 32
    assert row["times_smaller"] > 1


@pytest.mark.cells(3, by="result")
def test_syncs_with_deltas_send_less_than_full_ones(result: Any):
    here, fleet = result["fleets"]
    assert here["ways"]["auto"]["was_delta"] == 0
    ways = fleet["ways"]
    assert ways["always"]["was_delta"] == 1
    assert ways["off"]["was_delta"] == 0
    assert ways["always"]["sent_mib"] < ways["off"]["sent_mib"] / 2
