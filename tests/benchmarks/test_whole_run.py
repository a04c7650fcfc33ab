"""`benchmarks.whole_run`: what a short time on a device is spent on."""

from __future__ import annotations

import json
import shlex
import sys
from pathlib import Path

import pytest
import torch

from benchmarks import whole_run
from benchmarks.whole_run import Settings, Stage, make_models, run, stages
from verl.trainer import main_ppo
from verl.utils.device import any_device

TRAINING = ("hybrid", "deltas", "lora", "fp8", "experts", "engine dies", "rank dies")


@pytest.fixture(scope="module")
def output(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with small models under the names of the large ones."""
    directory = tmp_path_factory.mktemp("whole_run")
    make_models(Settings(device="cpu"), directory / "models", {"dense", "experts"})
    return directory


@pytest.mark.parametrize("name", TRAINING)
def test_what_a_stage_starts_on_a_device_passes_the_check_of_a_run(
    name: str, output: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    _, dash_m, module, *words = stages(Settings(device="cuda"), output)[name].command
    assert (dash_m, module) == ("-m", "verl.trainer.main_ppo")
    monkeypatch.setattr("sys.argv", [module, *words, "--check"])
    monkeypatch.setattr(main_ppo, "end_when_told", lambda: None)
    monkeypatch.setattr(main_ppo, "end_within", lambda *_: None)
    with any_device():
        main_ppo.main()
    assert capsys.readouterr().out.endswith("nothing was started\n")


def test_the_schedule_is_printed_and_nothing_is_started(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    assert whole_run.main(["--output", str(tmp_path), "--dry-run", "1", "--stages", "tests", "hybrid"]) == 0
    tests, gpu_check, hybrid, main = capsys.readouterr().out.splitlines()
    assert tests.startswith("tests: at most 120 s.")
    assert shlex.split(gpu_check)[:2] == ["bash", "scripts/gpu_check.sh"]
    assert hybrid.startswith("hybrid: at most 300 s.")
    assert "verl.trainer.main_ppo" in main
    assert list(tmp_path.iterdir()) == []


def test_a_failure_stops_nothing_and_what_no_longer_fits_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    python = (sys.executable, "-c")
    made = {
        "wrong": Stage(what="a", command=(*python, "raise SystemExit('why')"), limit_s=60, least_s=0),
        "hangs": Stage(what="b", command=(*python, "import time; time.sleep(600)"), limit_s=1, least_s=0),
        "right": Stage(what="c", command=(*python, "pass"), limit_s=60, least_s=0),
        "long": Stage(what="d", command=(*python, "pass"), limit_s=60, least_s=1e6),
    }
    monkeypatch.setattr(whole_run, "stages", lambda *_: made)
    assert whole_run.main(["--output", str(tmp_path), "--device", "cpu", "--budget-s", "1000"]) == 1
    lines = [json.loads(line) for line in (tmp_path / "results.jsonl").read_text().splitlines()]
    outcomes = {line["stage"]: line["outcome"] for line in lines}
    assert outcomes == {"wrong": "failed, exit code 1", "hangs": "out of time", "right": "passed", "long": "not run"}
    assert lines[0]["last_words"] == "why\n"
    assert lines[-1]["did"].endswith("s were left")
    assert "long: not run" in (tmp_path / "table.txt").read_text()
    assert (tmp_path / "logs.tar.gz").is_file()


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a device")
def test_without_a_device_nothing_is_started(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    assert whole_run.main(["--output", str(tmp_path), "--stages", "hybrid"]) == 2
    assert "sees no CUDA device; --device cpu rehearses" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_an_unknown_stage_is_an_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    assert whole_run.main(["--output", str(tmp_path), "--stages", "hybird"]) == 2
    assert "unknown stages ['hybird']; there are hybrid, tests," in capsys.readouterr().err


def test_the_process_that_is_killed_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(whole_run, "_steps", lambda _: [{}, {}])
    sleeping = (
        "import subprocess, sys; subprocess.run([sys.executable, '-c', 'import time; time.sleep(600)', 'victim'])"
    )
    stage = Stage(
        what="a", command=(sys.executable, "-c", sleeping), limit_s=60, output=tmp_path, meanwhile=_once_it_is_there
    )
    outcome = run("a", stage, 60, tmp_path / "log")
    assert outcome.did.startswith("killed ")
    assert outcome.seconds < 60


def _once_it_is_there(process, directory: Path) -> str:
    said = "no process"
    while said.startswith("no process"):
        said = whole_run.kill("victim")(process, directory)
    return said
