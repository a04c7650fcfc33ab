"""What documents name is there: files, directories, modules. Decisions have a title, a status and a date."""

from __future__ import annotations

import importlib.util
import re
from datetime import date
from pathlib import Path

import pytest
import yaml

from tests.docs.test_documentation import PAGES, ROOT, page_name

FOLDERS = ("verl", "tests", "docs", "examples", "recipe", "benchmarks", "scripts", "requirements")
MADE = ("benchmarks/results",)
"""By commands that the documents show."""
RECORDS = ("docs/adr/", "docs/lab/", "CHANGELOG.md")
"""They speak of the code at their date."""
DECISIONS = sorted((ROOT / "docs" / "adr").glob("[0-9]*.md"))
TODAY = [path for path in PAGES if not page_name(path).startswith(RECORDS)]


def text_of(page: Path) -> str:
    """Without the targets of links, which have a test of their own."""
    return re.sub(r"\]\([^)]*\)", "]", page.read_text(encoding="utf-8"))


@pytest.mark.parametrize("page", TODAY, ids=page_name)
def test_every_path_that_a_document_names_exists(page: Path):
    named = re.findall(rf"(?<![\w./<$-])((?:{'|'.join(FOLDERS)})/[\w./*-]*[\w*])", text_of(page))
    missing = {path for path in named if not any(ROOT.glob(path)) and not path.startswith(MADE)}
    assert not missing


@pytest.mark.parametrize("page", TODAY, ids=page_name)
def test_every_file_of_python_that_a_document_names_exists(page: Path):
    here = {path.name for folder in FOLDERS for path in (ROOT / folder).rglob("*.py")}
    named = re.findall(r"`([\w-]+\.py)`", text_of(page))
    assert set(named) <= here | written_in(page)


def written_in(page: Path) -> set[str]:
    """Files that a guide has its reader write."""
    return set(re.findall(r"[=/ ](\w+\.py)", " ".join(re.findall(r"```.*?```", page.read_text(), re.DOTALL))))


@pytest.mark.parametrize("page", TODAY, ids=page_name)
def test_every_module_that_a_document_has_python_run_exists(page: Path):
    named = re.findall(r"-m ((?:verl|tests|benchmarks|examples)(?:\.\w+)+)", text_of(page))
    assert [name for name in named if importlib.util.find_spec(name) is None] == []


@pytest.mark.parametrize("page", DECISIONS, ids=page_name)
def test_a_decision_has_its_number_a_title_a_status_and_a_date(page: Path):
    head = re.match(r"# (\d+)\. (\S.*)\n\n\* Status: (.+)\n\* Date: (\S+)\n", page.read_text())
    assert head, "begin as: # 27. Do this, an empty line, * Status: accepted, * Date: 2026-11-30"
    number, title, status, day = head.groups()
    assert page.name.startswith(f"{int(number):04}-")
    assert len(title) <= 80
    assert date.fromisoformat(day)
    replaced_by = re.fullmatch(r"replaced by \[\d+\]\((.+)\)", status)
    assert status == "accepted" or (replaced_by and (page.parent / replaced_by[1]).exists())


def test_every_decision_has_a_date_and_is_listed_and_in_the_navigation_with_its_title():
    overview = (ROOT / "docs" / "adr" / "README.md").read_text()
    navigation = str(yaml.safe_load((ROOT / "mkdocs.yml").read_text())["nav"])
    for page in DECISIONS:
        number, title = re.match(r"# (\d+)\. (.+)\n\n\* Status: .+\n\* Date: .+\n", page.read_text()).groups()
        assert f"| [{number}]({page.name}) | {title} |\n" in overview
        assert str({f"{number}. {title}": f"adr/{page.name}"}) in navigation
