"""The command line that all benchmarks have: options from a dataclass, the files they write, how they end."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from benchmarks.command import conduct, parse
from benchmarks.report import Report
from verl.utils.config import ConfigError, option


@dataclass(frozen=True, kw_only=True)
class Settings:
    size_gib: float = option(1.0, "size of the model", least=0.001)
    nodes: list[int] = option([1, 3], "rollout nodes", least=1, most=199)
    ways: list[str] = option(["gloo"], "ways", choices=("gloo", "nixl-chain"))
    dtype: str = option("bfloat16", "of weights", choices=("bfloat16", "float32"))
    limit: float | None = option(None, "if any", above=0)
    overrides: list[str] = option([], "words")

    def __post_init__(self) -> None:
        if not self.nodes:
            raise ConfigError("--nodes takes at least one number")


def test_settings_are_what_the_words_say_and_defaults_elsewhere(tmp_path: Path):
    words = ["a.b=1", "c=2", "--nodes", "2", "5", "--limit", "0.5", "--output", str(tmp_path)]
    settings, output = parse("some", "What it does.\n\nMore.", Settings, words)
    assert settings == Settings(nodes=[2, 5], limit=0.5, overrides=["a.b=1", "c=2"])
    assert output == tmp_path
    assert parse("some", "", Settings, [])[0] == Settings()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--size-gib", "0"], "--size-gib must be at least 0.001, not 0"),
        (["--size-gib", "nan"], "--size-gib must be at least 0.001, not nan"),
        (["--size-gib", "much"], "argument --size-gib"),
        (["--nodes", "3", "200"], "--nodes must be at least 1 and at most 199, not 200"),
        (["--nodes"], "--nodes takes at least one number"),
        (["--limit", "0"], "--limit must be above 0, not 0"),
        (["--ways", "gloo", "nixl-chian"], "--ways: unknown 'nixl-chian'. Did you mean 'nixl-chain'?"),
        (["--dtype", "float7"], "--dtype: unknown 'float7'. Did you mean 'float32'?"),
    ],
)
def test_what_cannot_be_meant_is_an_error_that_names_the_option(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str]
):
    with pytest.raises(SystemExit) as ended:
        parse("some", "", Settings, words)
    assert ended.value.code == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("asynchronous", [False, True])
def test_what_is_measured_is_written_with_its_settings_and_machine(
    asynchronous: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    async def later() -> dict[str, Any]:
        return {"seconds": 2.5}

    measure = later if asynchronous else lambda: {"seconds": 2.5}
    assert conduct("some", Settings(), tmp_path, measure, lambda result: Report([f"took {result['seconds']}"])) == 0
    result = json.loads((tmp_path / "result.json").read_text())
    assert (result["benchmark"], result["seconds"], result["settings"]["nodes"]) == ("some", 2.5, [1, 3])
    assert {"processor", "cores", "memory_gib", "load_average_1min", "torch"} <= result["machine"].keys()
    assert (tmp_path / "tables.md").read_text().startswith("took 2.5\n")
    assert str(tmp_path / "tables.md") in capsys.readouterr().out


def test_what_cannot_run_here_is_an_error_and_not_a_traceback(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    def measure() -> dict[str, Any]:
        raise ConfigError("this takes more memory")

    assert conduct("some", Settings(), tmp_path, measure, lambda _: Report([])) == 2
    assert capsys.readouterr().err == "error: this takes more memory\n"
