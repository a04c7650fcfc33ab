"""The site can be built: no broken link, no page outside of the navigation; tables show what was written."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest

from scripts.site_hooks import on_page_markdown, web_address

ROOT = Path(__file__).resolve().parents[2]
MKDOCS = ROOT / ".venv-docs" / "bin" / "mkdocs"


def test_union_types_in_tables_lose_the_escape_that_github_needs():
    page = "| `str \\| None` | a \\| b |\n\n`a \\| b` in a sentence"
    assert on_page_markdown(page) == "| `str | None` | a \\| b |\n\n`a \\| b` in a sentence"


@pytest.mark.parametrize(
    ("remote", "address"),
    [
        ("https://git.example/team/verl-sync.git", "https://git.example/team/verl-sync"),
        ("https://user:secret@git.example/team/verl-sync", "https://git.example/team/verl-sync"),
        ("git@git.example:team/verl-sync.git", "https://git.example/team/verl-sync"),
        ("/srv/repositories/verl-sync", None),
        ("", None),
    ],
)
def test_the_site_links_to_the_page_of_the_repository_without_credentials(remote: str, address: str | None):
    assert web_address(remote) == address


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if not MKDOCS.exists():
        pytest.skip("make docs installs mkdocs")
    site = tmp_path_factory.mktemp("site")
    built = subprocess.run(
        [MKDOCS, "build", "--strict", "--site-dir", site],
        cwd=ROOT,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert built.returncode == 0, built.stderr
    return site


def test_the_site_is_built_without_a_warning_and_shows_union_types(site: Path):
    page = (site / "configuration" / "index.html").read_text()
    assert "<code>str | list[str]</code>" in page
    assert "\\|" not in page


def test_the_site_loads_nothing_from_other_hosts(site: Path):
    page = (site / "index.html").read_text()
    assert re.findall(r'(?:src|rel="stylesheet" href)="(https?://[^"]+)"', page) == []
