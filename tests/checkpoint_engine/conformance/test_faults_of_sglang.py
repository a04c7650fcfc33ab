"""What `certify --faults` says of a server of SGLang whose broken promise is known, with a stand-in for its routes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests import forked
from tests.checkpoint_engine.conformance.slow_sglang import SlowSGLang, slow_sglang
from tests.checkpoint_engine.conformance.test_verdicts import run_pytest
from verl.checkpoint_engine.conformance.command import prompts_of
from verl.checkpoint_engine.conformance.contract import NEW, OLD, STUCK
from verl.checkpoint_engine.conformance.distance import TOLERANCES
from verl.checkpoint_engine.conformance.faults import FaultRun
from verl.checkpoint_engine.conformance.operators import SGLangOperator
from verl.checkpoint_engine.conformance.oracle import Oracle, changed_version
from verl.checkpoint_engine.conformance.probes import ProbedSGLang
from verl.checkpoint_engine.conformance.sglang_routes import SGLangDiskRoute
from verl.checkpoint_engine.conformance.verdicts import Cell
from verl.checkpoint_engine.errors import ActivationError, TransportError
from verl.utils.builtin import make_tiny_model

TOLERANCE = TOLERANCES["float32"]
Versions = tuple[Path, Path, Oracle]


@pytest.fixture(scope="module")
def versions(tmp_path_factory: pytest.TempPathFactory) -> Versions:
    directory = tmp_path_factory.mktemp("versions")
    model = make_tiny_model(directory / "A", "qwen2")
    oracle, _ = changed_version(model, directory / "B", prompts_of(250, 24), "float32", TOLERANCE, lambda _: None)
    return model, directory / "B", oracle


@pytest.fixture(scope="module")
def served(versions: Versions) -> Iterator[tuple[SlowSGLang, str]]:
    with slow_sglang(versions[0]) as found:
        yield found


@pytest.fixture
def engine(served: tuple[SlowSGLang, str], versions: Versions) -> Iterator[SlowSGLang]:
    """It computes with A, and has no fault."""
    engine, _ = served
    engine.heal()
    engine.load(versions[0])
    engine._label = "default"
    yield engine
    engine.heal()


@pytest.fixture
def run(served: tuple[SlowSGLang, str], versions: Versions, tmp_path: Path) -> Iterator[FaultRun]:
    model, other, oracle = versions
    run = FaultRun(
        server=ProbedSGLang(served[1], timeout_s=60),
        route=SGLangDiskRoute(served[1], timeout_s=60, pause_mode="abort"),
        oracle=oracle,
        directories=(model, other),
        tolerance=TOLERANCE,
        timeout_s=60,
        pause_mode="abort",
        route_name="disk",
        sglang=True,
        scratch=tmp_path,
        deadline_s=60,
    )
    yield run
    run.close()


def hit(run: FaultRun, fault: str, phase: str) -> tuple[Cell, set[str]]:
    cell = Cell(name=f"{fault}, {phase}", fault=fault, phase=phase)
    run.hit(cell)
    return cell, {finding.fault for finding in cell.findings}


def test_a_server_that_a_killed_pusher_leaves_paused_is_found(run: FaultRun, engine: SlowSGLang):
    run.deadline_s = 1.0
    cell, broken = hit(run, "pusher killed", "paused")
    assert broken == {"paused for ever"}
    assert (cell.state, cell.ended, cell.remedy) == (STUCK, "killed", "POST /continue_generation")
    assert cell.next_update == "yes"


def test_a_server_that_goes_on_by_itself_keeps_the_contract(run: FaultRun, engine: SlowSGLang):
    engine.resumes_itself_s = 0.3
    cell, broken = hit(run, "pusher killed", "paused")
    assert (cell.state, cell.label, broken) == (OLD, "default", set())


def test_a_load_whose_answer_is_lost_has_its_own_label(run: FaultRun, engine: SlowSGLang):
    cell, _ = hit(run, "connection lost", "loaded")
    assert cell.findings == []
    assert (cell.state, cell.ended) == (NEW, "failed")


def test_a_server_that_answers_a_resume_and_generates_nothing_is_out_of_service(
    served: tuple[SlowSGLang, str], engine: SlowSGLang
):
    operator = SGLangOperator(served[1], timeout_s=60)
    assert not operator.is_paused()
    engine._answer("/pause_generation", {})
    assert operator.is_paused()
    engine.stays_paused = True
    with pytest.raises(ActivationError, match="no token within 0.5 s"):
        operator.resume(0.5)
    engine.stays_paused = False
    operator.resume(60)
    assert not operator.is_paused()
    engine.dies_of_failure = engine.has_failed = True
    with pytest.raises(TransportError):
        operator.is_paused()


def test_the_plugin_of_pytest_pauses_it_as_it_was_told(
    served: tuple[SlowSGLang, str], engine: SlowSGLang, versions: Versions, tmp_path: Path
):
    before = engine.num_paused
    given = {"server": served[1], "model": versions[0], "routes": "disk", "pause-mode": "abort"}
    result = forked.run(run_pytest, *(f"--weight-update-{name}={value}" for name, value in given.items()), cwd=tmp_path)
    assert result.returncode == pytest.ExitCode.OK, result
    assert engine.num_paused == before + 4
