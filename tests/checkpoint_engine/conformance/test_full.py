"""What the steps of `certify --level full` say of an engine whose fault is known, and that no other step finds."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from xml.etree import ElementTree

import pytest

from tests.checkpoint_engine.conformance.slow_engine import SlowEngine, State, slow_engine
from verl.checkpoint_engine.certify import main
from verl.checkpoint_engine.conformance.adapters import OnTop, on_top
from verl.checkpoint_engine.conformance.command import prompts_of
from verl.checkpoint_engine.conformance.distance import TOLERANCES
from verl.checkpoint_engine.conformance.full import Leaving, Slept, full, in_mode
from verl.checkpoint_engine.conformance.oracle import Oracle, changed_version
from verl.checkpoint_engine.conformance.probes import ProbedVLLM
from verl.checkpoint_engine.conformance.routes import AdapterRoute, DiskRoute
from verl.checkpoint_engine.conformance.sequence import Run
from verl.checkpoint_engine.conformance.verdicts import Step
from verl.utils.builtin import make_tiny_model

TOLERANCE = TOLERANCES["float32"]
STEPS = ["after sleep 1", "after sleep 2", "clients leave", "pause mode abort", "pause mode keep", "adapter on top"]


@pytest.fixture(scope="module")
def directories(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    scratch = tmp_path_factory.mktemp("model")
    return make_tiny_model(scratch / "A", "qwen3"), scratch / "B"


@pytest.fixture(scope="module")
def oracle(directories: tuple[Path, Path]) -> Oracle:
    found, _ = changed_version(*directories, prompts_of(250, 24), "float32", TOLERANCE, lambda _: None)
    return found


@pytest.fixture(scope="module")
def served(directories: tuple[Path, Path]) -> Iterator[tuple[SlowEngine, str]]:
    with slow_engine(directories[0]) as found:
        yield found


@pytest.fixture
def run(served: tuple[SlowEngine, str], directories: tuple[Path, Path], oracle: Oracle) -> Iterator[Run]:
    """The server has A."""
    engine, url = served
    engine.heal()
    engine.load(directories[0])
    yield Run(
        server=ProbedVLLM(url, timeout_s=20),
        route=DiskRoute(url, timeout_s=20, pause_mode="wait"),
        oracle=oracle,
        directories=directories,
        tolerance=TOLERANCE,
        timeout_s=20,
        flight_tokens=32,
    )
    engine.heal()


@pytest.fixture
def adapter(run: Run, tmp_path: Path) -> Callable[[], OnTop]:
    route = AdapterRoute(run.server.url, timeout_s=20, pause_mode="wait")
    return lambda: on_top(run, tmp_path, "float32", route)


def test_a_server_without_a_fault_has_no_finding_and_every_step_is_tried(run, adapter, served):
    found = {step.name.partition(",")[0]: step for step in full(run, adapter)}
    assert list(found) == STEPS
    assert [(step.findings, step.skipped) for step in found.values()] == [([], "")] * len(STEPS)
    assert found["clients leave"].note.endswith("left") or "none could leave" in found["clients leave"].note
    assert not found["after sleep 2"].note
    assert served[0]._adapters == {}
    assert served[0]._label == str(len(STEPS))


class Differences:
    """A loader that adds what differs between two versions to what the engine has."""

    def __init__(self, last: State) -> None:
        self._last = {name: tensor.clone() for name, tensor in last.items()}

    def __call__(self, old: State, new: State) -> State:
        found = {name: old[name] + tensor - self._last[name] for name, tensor in new.items()}
        self._last = {name: tensor.clone() for name, tensor in new.items()}
        return found


FAULTS = {
    "wakes as a copy": ({"wakes_as_a_copy": True}, "after sleep 1", "not delivered"),
    "adds differences": ({"loader": Differences}, "after sleep 2", "wrongly loaded"),
    "keeps the cache of clients that left": (
        {"keeps_cache_of_the_left": True, "step_s": 0.01},
        "clients leave",
        "stale cache",
    ),
    "aborts nothing": ({"aborts_nothing": True, "step_s": 0.004}, "pause mode abort", "mixed versions"),
    "loses what it keeps": ({"drops_kept": True, "step_s": 0.004}, "pause mode keep", "lost request"),
    "keeps the cache of what it keeps": ({"keeps_kept_cache": True, "step_s": 0.004}, "pause mode keep", "stale cache"),
    "loses requests for an adapter": ({"drops_adapters": True, "step_s": 0.004}, "adapter on top", "lost request"),
    "merges an adapter once": ({"keeps_merged_base": True}, "adapter on top", "stale derived state"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_found_by_its_step_and_not_by_the_updates_before(name, run, adapter, served):
    engine = served[0]
    switches, step, fault = FAULTS[name]
    for switch, value in switches.items():
        setattr(engine, switch, value(engine.model.state_dict()) if value is Differences else value)
    assert [run.warm(to).findings for to in "BA"] == [[], []]
    tried: dict[str, Callable[[], Step]] = {
        "after sleep 1": lambda: run.warm("B", beside=Slept(1)),
        "after sleep 2": lambda: run.warm("B", beside=Slept(2), in_flight=False),
        "clients leave": lambda: run.warm("B", beside=Leaving([0.1])),
        "pause mode abort": lambda: in_mode(run, "abort"),
        "pause mode keep": lambda: in_mode(run, "keep"),
        "adapter on top": lambda: run.warm("B", beside=adapter()),
    }
    assert [one.fault for one in tried[step]().findings] == [fault]


def test_what_cannot_be_tried_is_named(run, adapter, served, monkeypatch):
    engine = served[0]
    engine.keeps_weights_asleep = True
    assert "the server kept its weights" in run.warm("B", beside=Slept(2), in_flight=False).note
    answer = engine._answer
    monkeypatch.setattr(engine, "_answer", lambda path, body: None if path == "/is_sleeping" else answer(path, body))
    steps = full(run, adapter)
    assert ["has no /sleep: start vLLM with VLLM_SERVER_DEV_MODE=1" in next(steps).skipped for _ in range(2)] == [
        True
    ] * 2
    assert in_mode(run, "retract").skipped == "the server, or its route, has no such mode"


@pytest.mark.job
def test_the_command_reports_every_step(served, directories, tmp_path, capsys):
    served[0].heal()
    served[0].load(directories[0])
    arguments = ["--model", str(directories[0]), "--server", served[1], "--route", "disk", "--dtype", "float32"]
    code = main([*arguments, "--level", "full", f"--junit={tmp_path / 'junit'}", f"--html={tmp_path / 'html'}"])
    written = capsys.readouterr().out
    assert code == 0, written
    assert all(f"{name}, " in written for name in STEPS)
    assert len(ElementTree.parse(tmp_path / "junit").getroot().findall("testcase")) == 5 + len(STEPS)
    assert main([*arguments, "--level", "full", "--faults"]) == 2
    assert "--level full is of a run without --faults" in capsys.readouterr().err
    assert main([*arguments[:2], "--level", "full"]) == 2
    assert "--level is of a running server" in capsys.readouterr().err
