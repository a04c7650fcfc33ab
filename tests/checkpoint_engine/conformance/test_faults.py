"""What `certify --faults` says of a server whose broken promise is known."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from xml.etree import ElementTree

import pytest

from tests.checkpoint_engine.conformance.slow_engine import SlowEngine, slow_engine
from verl.checkpoint_engine.certify import main
from verl.checkpoint_engine.conformance import contract
from verl.checkpoint_engine.conformance.command import prompts_of
from verl.checkpoint_engine.conformance.contract import GONE, MIXED, NEW, OLD, STUCK
from verl.checkpoint_engine.conformance.distance import TOLERANCES
from verl.checkpoint_engine.conformance.faults import FaultRun
from verl.checkpoint_engine.conformance.oracle import Oracle, changed_version
from verl.checkpoint_engine.conformance.probes import ProbedVLLM
from verl.checkpoint_engine.conformance.routes import DiskRoute
from verl.checkpoint_engine.conformance.verdicts import Cell
from verl.utils.builtin import make_tiny_model

TOLERANCE = TOLERANCES["float32"]
DEADLINE_S = 24.0
STUCK_S = 1.0
"""The deadline where nothing can happen before it."""
Hit = Callable[..., Cell]


@pytest.fixture(scope="module")
def versions(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, Oracle]:
    directory = tmp_path_factory.mktemp("versions")
    model = make_tiny_model(directory / "A", "qwen2")
    oracle, _ = changed_version(model, directory / "B", prompts_of(250, 24), "float32", TOLERANCE, lambda _: None)
    return model, directory / "B", oracle


@pytest.fixture(scope="module")
def served(versions: tuple[Path, Path, Oracle]) -> Iterator[tuple[SlowEngine, str]]:
    with slow_engine(versions[0]) as found:
        yield found


@pytest.fixture
def engine(served: tuple[SlowEngine, str], versions: tuple[Path, Path, Oracle]) -> Iterator[SlowEngine]:
    """It computes with A, and has no fault."""
    engine, _ = served
    engine.heal()
    engine.load(versions[0])
    engine._label = "default"
    yield engine
    engine.heal()


@pytest.fixture
def run(served: tuple[SlowEngine, str], versions: tuple[Path, Path, Oracle], tmp_path: Path) -> Iterator[FaultRun]:
    model, other, oracle = versions
    run = FaultRun(
        server=ProbedVLLM(served[1], timeout_s=20),
        route=DiskRoute(served[1], timeout_s=20, pause_mode="wait"),
        oracle=oracle,
        directories=(model, other),
        tolerance=TOLERANCE,
        timeout_s=20,
        flight_tokens=48,
        route_name="disk",
        scratch=tmp_path,
        deadline_s=DEADLINE_S,
    )
    yield run
    run.close()


def hit(run: FaultRun, fault: str, phase: str) -> Cell:
    cell = Cell(name=f"{fault}, {phase}", fault=fault, phase=phase)
    run.hit(cell)
    return cell


def broken(cell: Cell) -> set[str]:
    return {finding.fault for finding in cell.findings}


def test_a_server_that_a_killed_pusher_leaves_paused_is_found(run, engine):
    run.deadline_s = STUCK_S
    cell = hit(run, "pusher killed", "paused")
    assert broken(cell) == {"paused for ever"}
    assert (cell.state, cell.ended, cell.remedy) == (STUCK, "killed", "POST /resume")
    assert cell.next_update == "yes"
    assert cell.in_flight >= 3


def test_a_server_that_goes_on_by_itself_with_the_old_version_keeps_the_contract(run, engine):
    engine.resumes_itself_s = 0.3
    cell = hit(run, "pusher killed", "paused")
    assert cell.findings == []
    assert (cell.state, cell.label, cell.next_update) == (OLD, "default", "yes")


def test_a_label_that_moved_before_the_weights_is_found(run, engine):
    engine.resumes_itself_s, engine.names_on_pause = 0.3, "1"
    cell = hit(run, "pusher killed", "paused")
    assert broken(cell) == {"wrong label"}
    assert "computes with the old version and reports '1'" in cell.findings[0].text


def test_a_file_that_is_cut_off_and_refused_leaves_the_old_version(run, engine):
    cell = hit(run, "half of the bytes", "before")
    assert cell.findings == []
    assert (cell.state, cell.ended, cell.next_update) == (OLD, "failed", "yes")
    assert "SafetensorError" in cell.error


def test_a_server_that_a_failed_update_ends_is_found_and_has_to_be_restarted(run, engine):
    engine.dies_of_failure = True
    run.deadline_s = STUCK_S
    cell = hit(run, "half of the bytes", "before")
    assert "server lost" in broken(cell)
    assert (cell.state, cell.next_update, cell.remedy) == (GONE, "no", "restart the server")


def test_weights_that_are_mixed_after_half_a_load_are_found(run, engine):
    engine.takes_halves = True
    cell = hit(run, "half of the bytes", "before")
    assert "mixed weights" in broken(cell)
    assert (cell.state, cell.ended, cell.next_update) == (MIXED, "succeeded", "yes")


def test_a_flipped_bit_that_nobody_compares_is_found(run, engine):
    assert "mixed weights" in broken(hit(run, "flipped bit", "before"))


def test_a_server_that_takes_no_update_after_one_that_failed_ends_the_run(run, engine, monkeypatch):
    engine.refuses_after_failure = True
    by_name = {fault.name: fault for fault in contract.INJECTED}
    monkeypatch.setattr(contract, "INJECTED", (by_name["half of the bytes"], by_name["flipped bit"]))
    _, first, second = run.all(lambda _: None)
    assert isinstance(first, Cell) and isinstance(second, Cell)
    assert broken(first) == {"no way on"}
    assert first.remedy == "restart the server"
    assert second.skipped == "the server did not come back after half of the bytes, before"


def test_two_pushers_that_take_turns_leave_weights_under_the_label_of_others(run, engine):
    cell = hit(run, "second pusher", "loaded")
    assert "wrong label" in broken(cell)
    assert cell.ended == "succeeded, second succeeded"


def test_a_load_that_ends_after_the_deadline_has_the_old_label(run, engine):
    cell = hit(run, "deadline passed", "loaded")
    assert broken(cell) == {"wrong label"}
    assert (cell.state, cell.ended) == (NEW, "failed")


def test_a_process_that_is_stopped_goes_on_and_one_that_is_killed_is_gone(run, engine):
    worker = subprocess.Popen(["sleep", "600"])
    try:
        run.worker_pid = worker.pid
        assert hit(run, "worker stopped", "loading").state == NEW
        assert worker.poll() is None
        hit(run, "worker killed", "loading")
        assert worker.wait(10) == -9
    finally:
        worker.kill()
        worker.wait()


def test_the_command_prints_a_table_and_writes_cells_into_junit(
    versions, engine, served, tmp_path, capsys, monkeypatch
):
    monkeypatch.setattr(contract, "INJECTED", [one for one in contract.INJECTED if one.phases == ("before",)])
    arguments = ["--model", str(versions[0]), "--server", served[1], "--route", "disk", "--dtype", "float32"]
    arguments += ["--faults", "--deadline-seconds", str(DEADLINE_S)]
    files = [f"--{kind}={tmp_path / kind}" for kind in ("junit", "html", "json")]
    assert main([*arguments, *files]) == 1, capsys.readouterr()
    printed = capsys.readouterr().out
    assert "half of the bytes, before  failed" in printed
    assert "NOT kept" in printed
    suite = ElementTree.parse(tmp_path / "junit").getroot()
    cases = {case.get("name"): [child.tag for child in case] for case in suite}
    assert cases == {
        "cold A": [],
        "half of the bytes, before": ["system-out"],
        "flipped bit, before": ["failure"],
        "no space, before": ["skipped"],
    }
    assert "flipped bit, before" in (tmp_path / "html").read_text()
    assert engine._label.isdigit()


SERVER = ("--server", "http://127.0.0.1:9", "--route", "disk")


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--faults"], "--faults is of a running server"),
        ([*SERVER, "--worker-pid", "1"], "--worker-pid is of --faults"),
        ([*SERVER, "--faults", "--worker-pid", "4194305"], "no such process"),
        ([*SERVER, "--faults", "--deadline-seconds", "0"], "more than 0"),
        ([*SERVER, "--faults", "worker lost"], "--faults worker lost: unknown. There are pusher killed"),
    ],
)
def test_wrong_input_is_one_line_and_exit_code_2(arguments, text, versions, capsys):
    assert main(["--model", str(versions[0]), *arguments]) == 2
    captured = capsys.readouterr().err
    assert text in captured
    assert captured.count("\n") == 1
