"""The benchmark of a device runs, here with the CPU as one, and its result says everything; not how fast it is."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import device


def test_it_compares_what_it_moves_and_writes_down_what_it_measured(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    options = ["--device", "cpu", "--size-gib", "0.01", "--repeats", "1", "--changed", "0.01", "0.9"]
    assert device.main([*options, "--output", str(tmp_path)]) == 0
    result = json.loads((tmp_path / "result.json").read_text())
    assert [row["fraction"] for row in result["deltas"]] == [0.01, 0.9]
    assert all(value > 0 for value in (*result["publish"].values(), *result["activate"].values()))
    assert "publish float32 region" in capsys.readouterr().out
