"""What a conformance run with adapters says of an engine whose fault is known."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from tests.checkpoint_engine.conformance.slow_engine import SlowEngine, State, slow_engine
from verl.checkpoint_engine.certify import main
from verl.checkpoint_engine.conformance.adapters import AdapterRun, Adapters, adapter_versions
from verl.checkpoint_engine.conformance.command import prompts_of
from verl.checkpoint_engine.conformance.distance import TOLERANCES
from verl.checkpoint_engine.conformance.probes import ProbedVLLM
from verl.checkpoint_engine.conformance.routes import AdapterRoute
from verl.checkpoint_engine.conformance.verdicts import Finding
from verl.checkpoint_engine.errors import ConfigError
from verl.utils.builtin import make_tiny_model

TOLERANCE = TOLERANCES["float32"]
Q, UP = "model.layers.1.self_attn.q_proj.weight", "model.layers.0.mlp.up_proj.weight"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("model"), "qwen3")


@pytest.fixture(scope="module")
def adapters(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Adapters:
    scratch = tmp_path_factory.mktemp("adapters")
    return adapter_versions(model, scratch, prompts_of(250, 24), "float32", TOLERANCE, lambda _: None)


@pytest.fixture(scope="module")
def served(model: Path) -> Iterator[tuple[SlowEngine, str]]:
    with slow_engine(model) as found:
        yield found


@pytest.fixture
def run(served: tuple[SlowEngine, str], adapters: Adapters) -> Iterator[AdapterRun]:
    """The server has A."""
    engine, url = served
    engine.heal()
    route = AdapterRoute(url, timeout_s=20, pause_mode="wait")
    route.check()
    run = AdapterRun(
        server=ProbedVLLM(url, timeout_s=20, name=route.name),
        route=route,
        oracle=adapters.oracle,
        directories=adapters.directories,
        tolerance=TOLERANCE,
        timeout_s=20,
        flight_tokens=24,
        base=ProbedVLLM(url, timeout_s=20),
        model=adapters.base,
    )
    assert run.cold().findings == run.warm("A", in_flight=False).findings == []
    yield run
    engine.heal()
    route.close()


def test_two_adapters_and_their_base_are_told_apart(run, served):
    steps = [run.warm("B"), run.warm("A", again=True)]
    assert [step.findings for step in steps] == [[], []]
    assert max(step.deviation for step in steps) < TOLERANCE.nats


def old(*names: str) -> Callable[[State, State], State]:
    return lambda before, new: new | {name: before[name] for name in names}


FAULTS: dict[str, tuple[dict[str, object], str, set[str]]] = {
    "no tensor of the new adapter": ({"loader": lambda before, _: before}, "not delivered", set()),
    "no queries": ({"loader": old(Q)}, "partly loaded", {Q}),
    "no queries, no up": ({"loader": old(Q, UP)}, "partly loaded", {Q, UP}),
    "a cache of the old adapter": ({"keeps_cache": True}, "stale cache", set()),
    "the base instead of it": ({"ignores_adapters": True}, "wrong adapter", set()),
    "the base computed with it": ({"leaks_adapters": True}, "wrong adapter", set()),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_server_that_takes_an_adapter_wrongly_is_found(name, run, served):
    switches, fault, tensors = FAULTS[name]
    for switch, value in switches.items():
        setattr(served[0], switch, value)
    found: list[Finding] = run.warm("B", in_flight=False).findings
    assert [finding.fault for finding in found] == [fault]
    assert set(found[0].tensors) == tensors


def test_a_leak_into_the_base_is_seen_while_both_are_asked(run, served, monkeypatch):
    """As vLLM's on CPUs: alone, a request without an adapter is right."""
    engine = served[0]
    of, alone = engine._model_of, {"/weight_info"}

    def leaks(name):
        return next(iter(engine._adapters.values()))[1] if alone else of(name)

    monkeypatch.setattr(engine, "_model_of", leaks)
    asked = run._ask_beside

    def ask(*given):
        asked(*given)
        alone.clear()

    monkeypatch.setattr(run, "_ask_beside", ask)
    assert [finding.fault for finding in run.warm("B").findings] == ["wrong adapter"]


def test_what_a_run_loaded_is_gone_after_it_and_after_one_that_breaks_off(run, served):
    run.warm("B", in_flight=False)
    assert list(served[0]._adapters) == [run.route.name]
    assert run.bring_back()
    assert served[0]._adapters == {}


def test_a_server_of_another_model_is_refused(run, served):
    weight = served[0].model.lm_head.weight
    with torch.no_grad():
        weight.mul_(1.1)
    try:
        with pytest.raises(ConfigError, match="does not compute with the model"):
            run.cold()
    finally:
        with torch.no_grad():
            weight.div_(1.1)


@pytest.mark.job
def test_the_command_certifies_adapters_by_pefts_merged_model(model, served, capsys):
    served[0].heal()
    code = main(["--model", str(model), "--server", served[1], "--route", "lora", "--dtype", "float32"])
    written = capsys.readouterr().out
    assert code == 0, written
    assert "oracle: log-probs of PEFT's merged model" in written
    assert served[0]._adapters == {}


def test_a_server_without_adapters_is_told_how_to_start(model, served, monkeypatch, capsys):
    answer = served[0]._answer
    monkeypatch.setattr(served[0], "_answer", lambda path, body: None if "lora" in path else answer(path, body))
    assert main(["--model", str(model), "--server", served[1], "--route", "lora"]) == 2
    said = capsys.readouterr()
    assert "start vLLM with --enable-lora, and VLLM_ALLOW_RUNTIME_LORA_UPDATING=1" in said.out + said.err
    assert main(["--model", str(model), "--server", served[1], "--route", "lora", "--faults"]) == 2
