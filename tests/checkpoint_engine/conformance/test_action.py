"""The GitHub Action: its steps as a workflow runs them, against a server whose fault is known."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from xml.etree import ElementTree

import pytest
import yaml

from tests.checkpoint_engine.conformance.slow_engine import slow_engine
from verl.utils.builtin import make_tiny_model

ROOT = Path(__file__).resolve().parents[3]
DIRECTORY = ROOT / ".github" / "actions" / "certify"
ACTION = yaml.safe_load((DIRECTORY / "action.yml").read_text())
STEPS = ACTION["runs"]["steps"]
SHELL = ("bash", "--noprofile", "--norc", "-eo", "pipefail", "-c")
"""As GitHub's documentation has it for `shell: bash`."""
HEAD = "lm_head.weight"


def values(texts: dict[str, str], inputs: dict[str, str]) -> dict[str, str]:
    return {name: re.sub(r"\$\{\{ inputs\.([\w-]+) \}\}", lambda m: inputs[m[1]], text) for name, text in texts.items()}


class Job:
    """Of a repository in `directory`, whose own tests and options of pytest are not those of the action."""

    def __init__(self, directory: Path) -> None:
        self.directory, self.output = directory, directory / "output"
        (directory / "pytest.ini").write_text("[pytest]\naddopts = --no-such-option\n")
        (directory / "conftest.py").write_text("raise SystemExit('a conftest of the user')\n")
        (directory / "test_of_the_user.py").write_text("raise SystemExit('a test of the user')\n")

    def run(self, **given: str) -> tuple[int, str]:
        """Exit code and output of the first step that fails, or of the last one."""
        defaults = {name: about["default"] for name, about in ACTION["inputs"].items() if "default" in about}
        inputs = (
            defaults | {"package": "", "python": sys.executable} | {k.replace("_", "-"): v for k, v in given.items()}
        )
        done = None
        for step in STEPS:
            if "run" not in step or step.get("if") == "inputs.package != ''":
                continue
            environment = os.environ | values(step["env"], inputs) | {"GITHUB_OUTPUT": str(self.output)}
            environment["PYTHONPATH"] = str(ROOT)
            done = subprocess.run(
                [*SHELL, step["run"]], cwd=self.directory, env=environment, capture_output=True, text=True
            )
            if done.returncode:
                break
        assert done is not None
        return done.returncode, done.stdout + done.stderr


@pytest.fixture
def job(tmp_path: Path) -> Iterator[Job]:
    directory = tmp_path / "repository"
    directory.mkdir()
    return Job(directory)


def test_every_input_is_used_and_reaches_a_script_only_through_its_environment():
    used = set()
    for step in STEPS:
        assert "${{" not in step.get("run", ""), "whoever gives the input would write the script"
        used |= set(re.findall(r"inputs\.([\w-]+)", str(step)))
    assert used == ACTION["inputs"].keys()
    assert [name for name, about in ACTION["inputs"].items() if about.get("required")] == ["model"]


def test_the_report_is_uploaded_after_a_failure_too():
    assert STEPS[-1]["if"].startswith("always() && ")
    assert STEPS[-1]["with"]["path"] == "${{ inputs.junit }}"
    assert ACTION["outputs"]["exit-code"]["value"] == "${{ steps.certify.outputs.exit-code }}"


def test_a_server_without_a_fault_is_certified_and_one_that_keeps_a_tensor_fails_the_job_which_names_it(job, tmp_path):
    model = make_tiny_model(tmp_path / "model", "qwen3")
    with slow_engine(model) as (engine, url):
        assert job.run(server=url, model=str(model), routes="disk,nccl")[0] == 0
        assert job.output.read_text() == "exit-code=0\n"
        engine.loader = lambda _, new: {name: tensor for name, tensor in new.items() if name != HEAD}
        code, said = job.run(server=url, model=str(model), junit="again.xml", arguments="--weight-update-timeout=60")
    assert code == pytest.ExitCode.TESTS_FAILED, said
    assert f"partly loaded (or stale derived state): {HEAD}" in said
    assert job.output.read_text() == "exit-code=0\nexit-code=1\n"
    reports = [ElementTree.parse(job.directory / name).getroot()[0] for name in ("weight-updates.xml", "again.xml")]
    assert [(one.get("tests"), one.get("skipped"), one.get("failures")) for one in reports] == [
        ("2", "1", "0"),
        ("1", "0", "1"),
    ]


def test_no_server_ends_the_job_by_its_deadline_with_an_annotation(job):
    code, said = job.run(server="http://127.0.0.1:9", model="model", starts_within="0")
    assert (code, said) == (2, "::error::http://127.0.0.1:9/health gave no answer within 0 s\n")
    assert not job.output.exists()
