"""The project that `verl-sync init` makes runs as it is."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from verl.cli.main import cli


@pytest.fixture
def project(tmp_path: Path) -> Path:
    made = CliRunner().invoke(cli, ["init", str(tmp_path / "my project")])
    assert made.exit_code == 0, made.output
    return tmp_path / "my project"


def run(project: Path, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        words,
        cwd=project,
        env=os.environ | {"PYTHON": sys.executable},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


def test_its_data_are_made_its_reward_is_tested_and_its_run_passes_the_check(project: Path):
    for words in (["make_data.py"], ["-m", "unittest"]):
        done = run(project, sys.executable, *words)
        assert done.returncode == 0, done.stderr
    checked = run(project, "./train.sh", "--check")
    assert checked.returncode == 0, checked.stderr
    assert "nothing was started" in checked.stdout
    assert "checkpoints/runs/first" in checked.stdout
    assert {path.name for path in project.iterdir()} > {"README.md", ".gitignore", "reward.py", "data"}


def test_a_directory_that_holds_something_is_left_as_it_is(project: Path):
    (project / "reward.py").write_text("mine")
    again = CliRunner().invoke(cli, ["init", str(project)])
    assert (again.exit_code, again.output) == (
        2,
        f"Error: {project} is not empty: name a directory that is not there yet\n",
    )
    assert (project / "reward.py").read_text() == "mine"


def test_a_place_where_nothing_can_be_written_is_an_error(tmp_path: Path):
    (tmp_path / "file").write_text("")
    again = CliRunner().invoke(cli, ["init", str(tmp_path / "file" / "project")])
    assert (again.exit_code, "cannot be written: Not a directory" in again.output) == (2, True)
