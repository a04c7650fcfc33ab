"""`verl-sync plan`: tables, JSON, a picture, exit codes, and one line for what cannot be planned."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from verl.planning.command import main
from verl.planning.hardware import read_hardware
from verl.utils.builtin import builtin_model
from verl.utils.config import ConfigError

MODEL = str(builtin_model("builtin:tiny-qwen2") / "config.json")
SMALL = [MODEL, "--trainers", "2x2", "--rollouts", "3x2", "--link", "10gbit"]


def finding(check: str, value: float) -> dict[str, object]:
    return {"check": check, "where": "a", "state": "ok", "found": "", "remedy": "", "value": value}


def document(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict:
    assert main([*SMALL, "--json", *arguments]) in (0, 1)
    return json.loads(capsys.readouterr().out)


def test_json_has_bytes_seconds_and_memory(capsys: pytest.CaptureFixture[str]):
    found = document(capsys, "--delta", "1%")
    nbytes = found["model"]["nbytes"]
    assert sum(found["plan"]["owner_nbytes"]) == nbytes
    ways = {(way["backend"], way["topology"], way["delta"]): way for way in found["ways"]}
    assert ways["tcp", "direct", False]["nbytes_sent"] == 3 * nbytes
    assert ("gloo", "broadcast", True) in ways
    for way in ways.values():
        assert way["total_s"][0] <= way["total_s"][1]
        assert way["total_s"][1] == pytest.approx(sum(way["seconds"]["slow"].values()))
    least = min(way["total_s"][1] for way in ways.values())
    assert found["best"]["total_s"][1] == least
    assert found["best"]["links"]
    assert any(need["where"] == "trainer device" and need["fits"] for need in found["memory"])


def test_the_tables_name_the_best_way_and_what_bounds_it(capsys: pytest.CaptureFixture[str]):
    assert main(SMALL) == 0
    shown = capsys.readouterr().out
    assert "best: " in shown
    assert "bound by" in shown
    assert max(map(len, shown.splitlines())) <= 80


def test_what_was_measured_makes_the_interval_narrower(capsys: pytest.CaptureFixture[str], tmp_path: Path):
    file = tmp_path / "hosts.json"
    checks = {"memcpy": 3.0, "digest": 7.0, "host to device": 40.0, "device to host": 40.0, "memory": 100.0}
    findings = [finding(check, value) for check, value in checks.items()]
    file.write_text(json.dumps({"state": "ok", "findings": findings}))
    wide = document(capsys)["best"]["seconds"]
    found = document(capsys, "--hardware", str(file))
    narrow = found["best"]["seconds"]
    assert found["rates_measured"] == ["copy", "digest", "load", "to_host"]
    assert {need["available_nbytes"] for need in found["memory"] if need["where"] == "trainer host"} == {100 * 2**30}
    for phase in ("verify", "publish"):
        assert narrow["slow"][phase] - narrow["fast"][phase] < wide["slow"][phase] - wide["fast"][phase]


def test_what_does_not_fit_is_the_exit_code(capsys: pytest.CaptureFixture[str]):
    assert main([*SMALL, "--device-memory", "0.001"]) == 1
    shown = capsys.readouterr().out
    assert "does NOT fit" in shown
    assert "…" not in shown  # words are broken, not cut off


def test_rollouts_on_the_trainers_hosts_can_take_naive(capsys: pytest.CaptureFixture[str]):
    assert main([MODEL, "--trainers", "2x2", "--backend", "naive", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [way["backend"] for way in found["ways"]] == ["naive"]
    assert found["best"]["nbytes_sent"] == found["model"]["nbytes"]  # to the one other host


def test_steps_are_simulated_with_syncs_of_the_plan(capsys: pytest.CaptureFixture[str]):
    found = document(capsys, "--simulate", "prompts=4", "tokens=50", "steps=10", "update_s=1")
    for bound in ("fast", "slow"):
        assert [one["mode"] for one in found["steps"][bound]] == ["hybrid", "one_step_off", "fully_async"]
    assert found["steps"]["fast"][0]["step_s"] <= found["steps"]["slow"][0]["step_s"]
    assert main([*SMALL, "--simulate"]) == 0
    assert "simulated steps, syncs at their slower bound" in capsys.readouterr().out


def test_a_picture_is_drawn(tmp_path: Path):
    assert main([*SMALL, "--delta", "1%", "--plot", str(tmp_path / "plan.svg")]) == 0
    assert "<svg" in (tmp_path / "plan.svg").read_text()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["no/such/config.json"], "neither a model directory"),
        ([MODEL, "--tp", "2"], "--tp, --pp and --ep are for --strategy megatron"),
        (
            [MODEL, "--strategy", "megatron", "--tp", "3", "--trainers", "3"],
            "tensor_model_parallel_size=3 does not divide",
        ),
        ([MODEL, "--rollouts", "2x2", "--backend", "naive"], "leave --rollouts out"),
        ([MODEL, "--rollouts", "2x2", "--backend", "gloo", "--topology", "tree"], "gloo has no topology tree"),
        ([*SMALL, "--simulate", "prompt=4"], "Did you mean 'prompts'?"),
        ([*SMALL, "--simulate", "prompts"], "write NAME=NUMBER"),
        ([*SMALL, "--hardware", "no.json"], "is not what `verl-sync doctor --json` writes"),
        ([*SMALL, "--plot", "no/such/plan.png"], "there is no directory"),
    ],
)
def test_what_cannot_be_planned_is_one_line(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]):
    assert main(arguments) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert message in captured.err
    assert captured.err.startswith("error: ")


def test_another_file_is_no_hardware(tmp_path: Path):
    file = tmp_path / "x.json"
    file.write_text("[]")
    with pytest.raises(ConfigError, match="doctor"):
        read_hardware(file)


def test_help_fits_into_80_columns(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("COLUMNS", "80")
    with pytest.raises(SystemExit) as ended:
        main(["--help"])
    page = capsys.readouterr().out
    assert ended.value.code == 0
    assert all(word in page for word in ("--simulate", "--hardware", "exit code"))
    choices = "{auto,"  # argparse breaks no word
    assert max(len(line) for line in page.splitlines() if choices not in line) <= 80
