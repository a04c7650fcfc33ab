"""A server that `certify --engine` starts itself."""

from __future__ import annotations

import json
import signal
import sys
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path

import psutil
import pytest

from tests import forked
from tests.checkpoint_engine.fakes import soon
from tests.processes import wait_until_gone
from verl.checkpoint_engine.certify import main
from verl.checkpoint_engine.conformance import started
from verl.checkpoint_engine.conformance.started import ADAPTERS, ENGINES, UPDATES, arguments
from verl.checkpoint_engine.support.signals import end_when_told
from verl.utils.builtin import make_tiny_model

SLOW = replace(ENGINES["vllm"], module="tests.checkpoint_engine.conformance.slow_server")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("model") / "A", "qwen3")


@pytest.mark.parametrize(
    ("engine", "route", "on_top", "flags"),
    [
        ("vllm", "arena", False, UPDATES),
        ("vllm", "arena", True, UPDATES),
        ("vllm", "disk", False, ()),
        ("vllm", "disk", True, ADAPTERS),
        ("vllm", "lora", False, ADAPTERS),
        ("sglang", "tensor", True, ()),
    ],
)
def test_each_route_gets_the_flags_that_it_needs(engine, route, on_top, flags, model):
    given = {"route": route, "dtype": "auto", "ranks": 1, "on_top": on_top}
    plain = arguments(engine, model, **given | {"route": "disk", "on_top": False}, more=())
    assert arguments(engine, model, **given, more=["--port-of-mine"]) == [*plain, *flags, "--port-of-mine"]


def test_a_context_is_never_longer_than_the_models(model, tmp_path):
    config = json.loads((model / "config.json").read_text()) | {"max_position_embeddings": 64}
    (tmp_path / "config.json").write_text(json.dumps(config))
    found = arguments("vllm", tmp_path, route="disk", dtype="float32", ranks=2, on_top=False, more=())
    assert found[found.index("--max-model-len") + 1] == "64"
    assert found[-4:] == ["--dtype", "float32", "--tensor-parallel-size", "2"]


@pytest.mark.job
def test_a_server_is_started_certified_and_ended(model, monkeypatch, capsys):
    monkeypatch.setitem(ENGINES, "vllm", SLOW)
    code = main(["--model", str(model), "--engine", "vllm", "--route", "disk", "--dtype", "float32"])
    said = capsys.readouterr()
    assert code == 0, said
    assert "certified: the server computes with every version" in said.out
    assert _servers() == []


def _servers() -> list[psutil.Process]:
    return [child for child in psutil.Process().children(recursive=True) if SLOW.module in child.cmdline()]


@pytest.mark.job
def test_a_server_that_does_not_start_is_one_line_with_its_error(model, monkeypatch, capsys):
    monkeypatch.setitem(ENGINES, "vllm", SLOW)
    assert main(["--model", str(model), "--engine", "vllm", "--route", "disk", "--", "--fails"]) == 2
    said = capsys.readouterr().err
    assert "error: vllm ended with exit code 1: RuntimeError: no memory for the KV cache" in said
    assert said.count("\n") == 1


def certify_until_told(pipe: Connection, model: Path, log: Path) -> None:
    sys.stderr = log.open("w", buffering=1)
    ENGINES["vllm"] = SLOW
    end_when_told()
    sys.exit(main(["--model", str(model), "--engine", "vllm", "--route", "disk", "--dtype", "float32"]))


@pytest.mark.job
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL], ids=lambda number: number.name)
def test_the_server_ends_with_certify(number, model, tmp_path):
    log = tmp_path / "log"
    log.touch()
    process, _ = forked.start(certify_until_told, model, log)
    certify = psutil.Process(process.pid)
    assert soon(lambda: "cold A" in log.read_text() or not process.is_alive()), log.read_text()
    children = certify.children(recursive=True)
    assert any(SLOW.module in child.cmdline() for child in children)
    certify.send_signal(number)
    process.join()
    assert process.exitcode == (-number if number == signal.SIGKILL else 130), log.read_text()
    assert "bringing the server's own version back" not in log.read_text()
    assert wait_until_gone(children) == []


@pytest.mark.parametrize(
    ("given", "text"),
    [
        (["--engine", "vllm", "--server", "http://127.0.0.1:9"], "name one of them"),
        (["--engine", "vllm", "--route", "dsik"], "--route dsik is unknown"),
        (["--engine", "vllm", "--worker-pid", "1", "--faults"], "of a server that you have started"),
        (["--server", "http://127.0.0.1:9", "--route", "disk", "--", "--x"], "--x: flags after -- are of a server"),
        (["--", "--x"], "--x: flags after -- are of a server"),
    ],
)
def test_wrong_input_is_one_line_and_starts_nothing(given, text, model, monkeypatch, capsys):
    monkeypatch.setattr(started.subprocess, "Popen", None)
    assert main(["--model", str(model), *given]) == 2
    said = capsys.readouterr().err
    assert text in said
    assert said.count("\n") == 1


def test_a_route_that_needs_a_device_is_skipped_before_a_server_starts(model, monkeypatch):
    monkeypatch.setattr(started.subprocess, "Popen", None)
    assert main(["--model", str(model), "--engine", "vllm", "--route", "nccl"]) == 3
