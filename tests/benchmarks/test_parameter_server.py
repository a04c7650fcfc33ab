"""The benchmark runs, and its result says everything; how fast it is, is not tested here."""

from __future__ import annotations

import dataclasses
import json

import pytest

from benchmarks.parameter_server import CASES, analyse, main
from verl.checkpoint_engine.parameter_server.progress import Event, UpdateReport


@pytest.mark.cells(3)
def test_the_result_holds_every_stage_beside_the_raw_speed_of_its_library(tmp_path, capsys):
    arguments = ["--size-gib", "0.008", "--bucket-megabytes", "2", "--repeats", "2", "--output", str(tmp_path)]
    assert main(arguments) == 0
    result = json.loads((tmp_path / "result.json").read_text())
    assert {"processor", "cores", "load_average_1min"} <= set(result["machine"])
    for name, case in CASES.items():
        assert len(result["samples"][name]) == 2
        for sample in result["samples"][name]:
            assert sample["buckets"] >= 4
            assert sample["load_s"] > 0
            assert (sample["broadcast_s"] > 0) == (len(case.ranks) > 1)
            assert (sample["fetch_s"] > 0) == case.p2p
            assert min(sample["gloo"], sample["mooncake"]) > 0
        summary = result["summary"][name]
        assert (summary["fetch_of_raw"] is not None) == case.p2p
        assert (summary["broadcast_of_raw"] is not None) == (len(case.ranks) > 1)
    assert "fetch of raw" in capsys.readouterr().out


def test_stages_are_busy_when_they_work_and_the_bound_is_theirs():
    """Two buckets: fetched in 2 s each, broadcast in 1, loaded in 3; the second waits in line for the engine."""
    times = {
        ("fetch", 0): (0, 2),
        ("fetch", 1): (2, 4),
        ("broadcast", 0): (2, 3),
        ("broadcast", 1): (4, 5),
        ("load", 0): (3, 6),
        ("load", 1): (5, 9),
    }
    events = [
        Event(float(time), 0, f"{stage}-{edge}", bucket)
        for (stage, bucket), span in times.items()
        for edge, time in zip(("start", "end"), span, strict=True)
    ]
    report = UpdateReport(
        name="x",
        mode="p2p",
        ranks=(0, 1),
        nbytes=8,
        buckets=2,
        bucket_nbytes=4,
        staged=True,
        seconds=10.0,
        events=tuple(events),
    )
    found = analyse([report])
    assert (found["fetch_s"], found["broadcast_s"], found["load_s"]) == (4, 2, 6)
    assert (found["moving_s"], found["bucket_s"]) == (9, 6)
    assert found["of_bound"] == pytest.approx(9 / (1.25 * 6 + 6))
    late = dataclasses.replace(
        report, events=(Event(2.5, 1, "broadcast-start", 0), Event(3.0, 1, "broadcast-start", 1))
    )
    assert analyse([report, late])["broadcast_s"] == 1.5


@pytest.mark.cells(3)
def test_a_checkpoint_that_does_not_fit_the_memory_is_refused_before_anything_starts(tmp_path, capsys):
    assert main(["--size-gib", "100000", "--output", str(tmp_path)]) == 2
    assert "GiB of memory" in capsys.readouterr().err
