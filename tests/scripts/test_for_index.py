"""What a package index shows of README.md: no link and no picture that leads nowhere."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "scripts" / "for_index.py"
TAG = "v" + tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
URL = "https://example.com/somebody/verl-sync"
FILES = [
    folder / name for folder in (Path(), Path("distributions/verl_sync")) for name in ("README.md", "pyproject.toml")
]
LINK = re.compile(r"(!?)\[[^\]]*\]\(([^)#\s]+)")


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    for path in FILES:
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / path, tmp_path / path)
    return tmp_path


def prepare(folder: Path, *url: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, SCRIPT, folder, *url], capture_output=True, text=True)


def links_of(folder: Path) -> list[tuple[str, str]]:
    return [found for path in FILES if path.name == "README.md" for found in LINK.findall((folder / path).read_text())]


def urls_of(path: Path) -> dict[str, str]:
    return tomllib.loads(path.read_text())["project"].get("urls", {})


def test_links_and_pictures_lead_to_files_of_the_public_repository(copy: Path):
    before = links_of(copy)
    assert [path for _, path in before if not path.startswith("https://") and not (ROOT / path).exists()] == []
    for _ in range(2):  # the second time it finds nothing to do
        assert prepare(copy, URL + "/").returncode == 0
        assert [link for _, link in links_of(copy)] == [
            path if path.startswith("https://") else f"{URL}/{'raw' if picture else 'blob'}/{TAG}/{path}"
            for picture, path in before
        ]
    for path in FILES:
        if path.name == "pyproject.toml":
            assert urls_of(copy / path)["Repository"] == URL
            assert urls_of(copy / path)["Changelog"] == f"{URL}/blob/{TAG}/CHANGELOG.md"
            assert urls_of(ROOT / path) == {}


def test_without_a_public_repository_the_text_of_links_stays_and_no_picture(copy: Path):
    assert prepare(copy).returncode == 0
    assert [link for _, link in links_of(copy) if not link.startswith("https://")] == []
    text = (copy / "README.md").read_text()
    assert "![" not in text
    assert "Security · Contributing · Changelog" in text


def test_what_is_no_repository_is_refused_and_nothing_is_written(copy: Path):
    done = prepare(copy, "git@example.com:somebody")
    assert done.returncode == 1
    assert "'git@example.com:somebody' is not the URL of a repository" in done.stderr
    assert (copy / "README.md").read_text() == (ROOT / "README.md").read_text()
