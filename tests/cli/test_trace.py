"""`verl-sync trace` keeps the rules of the trace event format, and says what the files of the run say."""

from __future__ import annotations

import json
import math
import os
import re
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.cli.runs import BEGAN_S, PHASE_S, write_run
from verl.cli.main import cli
from verl.cli.run_files import read_run
from verl.cli.trace import trace_events
from verl.cli.tracks import timeline
from verl.utils.timing import Span, write_spans


def trace(directory: Path, *arguments: str) -> Result:
    return CliRunner().invoke(cli, ["trace", str(directory), *arguments])


def events_of(directory: Path) -> list[dict[str, Any]]:
    assert trace(directory).exit_code == 0
    return json.loads((directory / "trace.json").read_text())["traceEvents"]


def require_format(events: list[dict[str, Any]]) -> None:
    """The rules of the format for the two kinds of events that we write: metadata, and complete events."""
    named, used = set(), set()
    slices = defaultdict(list)
    for event in events:
        assert event["ph"] in ("M", "X")
        assert isinstance(event["pid"], int)
        assert isinstance(event["tid"], int)
        assert isinstance(event["args"], dict)
        if event["ph"] == "M":
            assert event["name"] in ("process_name", "process_sort_index", "thread_name", "thread_sort_index")
            key = "sort_index" if event["name"].endswith("sort_index") else "name"
            assert event["args"].keys() == {key}
            if event["name"] == "thread_name":
                named.add((event["pid"], event["tid"]))
            continue
        assert isinstance(event["name"], str)
        assert isinstance(event["cat"], str)
        for field in ("ts", "dur"):
            assert isinstance(event[field], (int, float))
            assert math.isfinite(event[field])
            assert event[field] >= 0
        used.add((event["pid"], event["tid"]))
        begin_ns = round(event["ts"] * 1000)
        slices[event["pid"], event["tid"]].append((begin_ns, begin_ns + round(event["dur"] * 1000)))
    assert used <= named
    for track in slices.values():
        around: list[int] = []
        for begin, end in track:  # in the order of the file: an outer one comes first
            while around and around[-1] <= begin:
                around.pop()
            assert not around or end <= around[-1], "two slices of a track overlap by a part"
            around.append(end)


def tracks_of(events: list[dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    names = {(event["pid"], event["tid"]): event["args"]["name"] for event in events if event["name"] == "thread_name"}
    found = defaultdict(list)
    for event in events:
        if event["ph"] == "X":
            found[names[event["pid"], event["tid"]]].append(event)
    return found


def test_a_run_becomes_a_trace_with_a_track_for_every_member(tmp_path: Path):
    events = events_of(write_run(tmp_path))
    require_format(events)
    assert tracks_of(events).keys() == {"trainer", "sync", "replica-0", "replica-1", "node-0", "node-1", "node-2"}


def test_a_sync_is_unfolded_into_its_phases(tmp_path: Path):
    syncs = tracks_of(events_of(write_run(tmp_path)))["sync"]
    whole = next(event for event in syncs if event["name"] == "version 7")
    end = whole["ts"] + whole["dur"]
    within = [event for event in syncs if event is not whole and whole["ts"] <= event["ts"] < end]
    assert {event["name"]: event["dur"] / 1e6 for event in within if event["dur"]} == pytest.approx(
        {phase: seconds for phase, seconds in PHASE_S.items() if seconds}
    )
    assert whole["dur"] / 1e6 == pytest.approx(sum(PHASE_S.values()))
    assert whole["args"]["MB moved"] == 3000
    assert sum(event["name"] == "stage" for event in syncs) == 14  # not again from the timeline


def test_what_a_member_did_in_a_sync_is_on_its_own_track(tmp_path: Path):
    tracks = tracks_of(events_of(write_run(tmp_path)))
    (stage,) = [event for event in tracks["node-1"] if event["args"]["version"] == 7]
    (whole,) = [event for event in tracks["sync"] if event["name"] == "version 7"]
    assert stage["name"] == "stage"
    assert stage["ts"] == pytest.approx(whole["ts"] + 0.2e6)
    assert stage["dur"] == pytest.approx(1e6)
    assert stage["args"]["MB"] == 1500


def test_an_aborted_sync_says_why(tmp_path: Path):
    syncs = tracks_of(events_of(write_run(tmp_path)))["sync"]
    aborted, committed = [event for event in syncs if event["name"] == "version 3"]
    assert aborted["args"]["outcome"] == "aborted"
    assert "node-1 <gone>" in aborted["args"]["error"]
    assert "error" not in committed["args"]


def test_times_are_those_of_the_files(tmp_path: Path):
    events = tracks_of(events_of(write_run(tmp_path)))["trainer"]
    (step,) = [event for event in events if event["name"] == "step" and event["args"]["version"] == 2]
    first_s = BEGAN_S + 8  # the sync of version 0
    assert step["ts"] / 1e6 == pytest.approx(BEGAN_S + 20 - first_s, abs=1e-5)
    assert step["dur"] / 1e6 == pytest.approx(9.9, abs=1e-5)


def test_syncs_without_a_report_are_drawn_from_the_timeline(tmp_path: Path):
    run = write_run(tmp_path)
    (run / "sync_reports.jsonl").unlink()
    syncs = tracks_of(events_of(run))["sync"]
    assert {event["name"] for event in syncs} == set(PHASE_S)


@settings(deadline=None)
@given(st.lists(st.tuples(st.floats(0, 9), st.floats(0, 9)), max_size=20))
def test_spans_that_overlap_get_tracks_of_their_own(tmp_path_factory: pytest.TempPathFactory, moments):
    directory = tmp_path_factory.mktemp("run")
    spans = [
        Span(role="trainer", name=str(number), start_s=BEGAN_S + first, stop_s=BEGAN_S + first + length)
        for number, (first, length) in enumerate(moments)
    ]
    write_spans(directory / "timeline.jsonl", [*spans, Span(role="trainer", name="last", start_s=1.0, stop_s=2.0)])
    events = list(trace_events(timeline(read_run(directory))))
    require_format(events)
    assert sum(event["ph"] == "X" for event in events) == len(spans) + 1


def test_whoever_may_read_the_run_may_read_the_trace_and_nobody_else(tmp_path: Path):
    run = write_run(tmp_path / "run")
    for mode in (0o600, 0o640):
        for file in run.glob("*.jsonl"):
            file.chmod(mode)
        assert trace(run, "-o", str(tmp_path / "mine.json")).exit_code == 0
        assert (tmp_path / "mine.json").stat().st_mode & 0o777 == mode


@pytest.mark.parametrize(
    ("file", "text", "said"),
    [
        ("timeline.jsonl", '{"role": 1}\n', "role"),
        ("timeline.jsonl", '{"role": "a", "name": "b", "start_s": NaN, "stop_s": 1}\n', "is not a number"),
        ("sync_reports.jsonl", '{"version": "x"}\n', "version"),
        ("metrics.jsonl", "[]\n", "not a record"),
    ],
)
def test_a_file_that_is_none_of_a_run_is_an_error_in_words(tmp_path: Path, file: str, text: str, said: str):
    (tmp_path / file).write_text(text)
    done = trace(tmp_path)
    assert done.exit_code == 2
    assert said in done.output


def test_what_a_kill_cut_short_is_left_out(tmp_path: Path):
    run = write_run(tmp_path)
    before = len(events_of(run))
    with (run / "timeline.jsonl").open("a") as file:
        file.write('{"role": "trai')
    assert len(events_of(run)) == before


def test_a_directory_without_a_run_is_told(tmp_path: Path):
    assert "has no run" in trace(tmp_path).output
    assert trace(tmp_path / "nowhere").exit_code == 2


def test_a_pipe_is_written_to_and_a_link_stays_while_what_is_behind_it_is_replaced(tmp_path: Path):
    run, pipe, link = write_run(tmp_path / "run"), tmp_path / "pipe", tmp_path / "link"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    link.symlink_to(tmp_path / "trace.json")
    for place in (pipe, link):
        assert trace(run, "-o", str(place)).exit_code == 0
    with os.fdopen(reader) as file:
        assert file.read() == (tmp_path / "trace.json").read_text()
    assert (pipe.is_fifo(), link.is_symlink()) == (True, True)


@pytest.mark.parametrize("place", ["nowhere/trace.json", "metrics.jsonl/trace.json", "/proc/trace.json"])
def test_a_file_that_cannot_be_written_is_told(tmp_path: Path, place: str):
    done = trace(write_run(tmp_path), "-o", str(tmp_path / place))
    assert done.exit_code == 2
    assert re.fullmatch(rf"Error: cannot write .*{place}: [\w ]+\. Name another file with --output\n", done.output)
