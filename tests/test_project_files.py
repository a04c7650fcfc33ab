"""Images, workflows, forms for issues and what a release says: that what they name exists, and says the same."""

from __future__ import annotations

import re
import shlex
import subprocess
import tomllib
from pathlib import Path
from shutil import which

import pytest
import yaml

ROOT = Path(__file__).resolve().parent.parent
DOCKERFILES = sorted((ROOT / "docker").glob("*.Dockerfile"))
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
FORMS = sorted(set((ROOT / ".github" / "ISSUE_TEMPLATE").glob("*.yml")) - {ROOT / ".github/ISSUE_TEMPLATE/config.yml"})
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
INSTRUCTIONS = {"FROM", "ARG", "RUN", "COPY", "WORKDIR", "USER", "ENV", "ENTRYPOINT", "CMD"}


def instructions(path: Path) -> list[tuple[str, str]]:
    text = re.sub(r"^#.*\n", "", path.read_text(), flags=re.MULTILINE).replace("\\\n", " ")
    return [(line.split()[0], line.split(maxsplit=1)[1]) for line in text.splitlines() if line.strip()]


def name_of(path: Path) -> str:
    return path.name


@pytest.mark.parametrize("path", DOCKERFILES, ids=name_of)
def test_an_image_is_made_of_known_instructions_and_runs_the_command_as_no_root(path: Path):
    found = instructions(path)
    assert {name for name, _ in found} <= INSTRUCTIONS
    assert [value for name, value in found if name == "USER"] == ["trainer"]
    assert dict(found)["ENTRYPOINT"] == '["verl-sync"]'
    assert ("COPY", ". .") in found
    for name, value in found:
        if name == "RUN":
            assert subprocess.run(["bash", "-n", "-c", value]).returncode == 0
    for extra in re.findall(r'"\.\[([\w,]+)\]"|EXTRAS=([\w,]+)', path.read_text()):
        assert set("".join(extra).split(",")) <= PROJECT["optional-dependencies"].keys()


def test_the_cpu_image_has_the_system_packages_that_the_installer_asks_for():
    installer = (ROOT / "scripts" / "install_cpu.sh").read_text()
    needed = set(re.findall(r"missing\+=\((lib\w+(?:\+\+6)?)\)", installer))
    image = " ".join(value for _, value in instructions(ROOT / "docker" / "cpu.Dockerfile"))
    assert len(needed) == 4
    assert needed <= set(shlex.split(image))


@pytest.mark.skipif(not (ROOT / ".git").exists() or which("git") is None, reason="this is no clone, or git is missing")
def test_what_an_image_need_not_have_is_left_out_and_nothing_that_is_tracked():
    left_out = (ROOT / ".dockerignore").read_text().split()
    tracked = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()
    assert {".git", ".venv"} <= set(left_out)
    assert not [name for name in tracked if name.split("/")[0] in left_out]


@pytest.mark.parametrize("path", WORKFLOWS, ids=name_of)
def test_a_workflow_runs_what_is_here_with_a_limit_and_may_only_read(path: Path):
    workflow = yaml.safe_load(path.read_text())
    assert workflow["permissions"] == {"contents": "read"}
    assert workflow[True]  # YAML takes the key `on` for a truth value
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    for job in workflow["jobs"].values():
        assert job["timeout-minutes"] <= 120
        for step in job["steps"]:
            assert step.keys() & {"uses", "run"}
            words = step.get("run", "").split()
            if words[:1] == ["make"]:
                assert words[1] in targets
            elif words and words[0] != "sudo":
                assert (ROOT / words[0]).stat().st_mode & 0o100


def test_the_workflow_of_every_change_is_the_projects_whole_check():
    jobs = yaml.safe_load((ROOT / ".github" / "workflows" / "ci.yml").read_text())["jobs"]
    assert ".ci/run" in [step.get("run") for step in jobs["everything"]["steps"]]


@pytest.mark.parametrize("path", FORMS, ids=name_of)
def test_a_form_has_what_github_wants_of_one(path: Path):
    form = yaml.safe_load(path.read_text())
    assert form.keys() >= {"name", "description", "body"}
    fields = [field for field in form["body"] if field["type"] != "markdown"]
    assert len({field["id"] for field in fields}) == len(fields) > 0
    for field in form["body"]:
        assert field["type"] in ("markdown", "textarea", "input", "dropdown", "checkboxes")
        assert "value" in field["attributes"] if field["type"] == "markdown" else field["attributes"]["label"]


def test_the_citation_says_what_the_package_says():
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert citation.keys() >= {"cff-version", "message", "title", "authors"}
    assert (citation["version"], citation["license"]) == (PROJECT["version"], PROJECT["license"])


def test_the_release_script_refuses_what_it_does_not_know():
    done = subprocess.run([ROOT / "scripts" / "release.sh", "--publish"], capture_output=True, text=True)
    assert done.returncode == 1
    assert done.stderr == "error: unknown option --publish; known: --train\n"
