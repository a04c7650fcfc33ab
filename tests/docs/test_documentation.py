"""What the documentation says can be checked: keys, links, code taken from examples, verl's names."""

from __future__ import annotations

import importlib
import re
import shlex
from pathlib import Path

import pytest
import yaml

from verl.trainer.config.from_verl.keys import RULES
from verl.trainer.config.from_verl.rules import is_verls
from verl.trainer.config.loader import load_config
from verl.trainer.config.schema import is_known, keys
from verl.utils.config import ConfigError

ROOT = Path(__file__).resolve().parents[2]
TOP = ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md")
PAGES = [ROOT / name for name in TOP] + sorted(ROOT.glob("docs/**/*.md"))
COMMAND = re.compile(r"^(?:\$ )?(?:\S*python -m verl\.trainer\.main_ppo|make run) ?(.*)$", re.MULTILINE)
COMPAT = ROOT / "docs" / "coming-from-verl.md"


def page_name(path: Path) -> str:
    return str(path.relative_to(ROOT))


def fences(text: str) -> list[tuple[str, str]]:
    """(the line above, content) of every fenced block."""
    return re.findall(r"(?:^|\n)([^\n]*)\n```[a-z]*\n(.*?)\n```", text, re.DOTALL)


def overrides(line: str) -> list[str]:
    words = shlex.split(line, comments=True)
    if words and words[0].startswith("ARGS="):
        words = words[0].removeprefix("ARGS=").split()
    return [word for word in words if "=" in word and not word.startswith("-")]


def commands(path: Path) -> list[str]:
    """The arguments of every training command in the fenced blocks and code spans of a page."""
    text = path.read_text()
    blocks = [block.replace("\\\n", " ") for _, block in fences(text)]
    spans = re.findall(r"`(make run [^`]+)`", text)
    return [match[1] for block in [*blocks, *spans] for match in COMMAND.finditer(block)]


@pytest.mark.parametrize("page", PAGES, ids=page_name)
def test_every_training_command_sets_keys_that_exist(page: Path):
    for line in commands(page):
        if "data.train_batchsize" in line:  # shown for its error
            with pytest.raises(ConfigError, match=r"Did you mean 'data\.train_batch_size'\?"):
                load_config(overrides(line))
        else:
            load_config(overrides(line))


def test_the_commands_of_the_readme_are_found():
    assert sum(bool(overrides(line)) for line in commands(ROOT / "README.md")) >= 5


@pytest.mark.parametrize("page", PAGES, ids=page_name)
def test_every_link_leads_to_a_file_and_to_a_heading_in_it(page: Path):
    text = re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if target.startswith(("http://", "https://")):
            continue
        name, _, anchor = target.partition("#")
        file = page if not name else page.parent / name
        assert file.exists(), f"{target} does not exist"
        if anchor:
            headings = re.findall(r"^#+ (.*)$", file.read_text(), re.MULTILINE)
            assert anchor in {slug(heading) for heading in headings}, f"{target}: no such heading"


def slug(heading: str) -> str:
    return re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-")


@pytest.mark.parametrize("page", PAGES, ids=page_name)
def test_code_that_is_shown_as_an_example_is_the_tested_code(page: Path):
    for above, content in fences(page.read_text()):
        if match := re.fullmatch(r"<!-- (examples/\S+) -->", above):
            assert content in (ROOT / match[1]).read_text(), f"differs from {match[1]}:\n{content}"


def test_every_guide_shows_tested_code():
    for guide in sorted((ROOT / "docs" / "how-to").glob("*.md")):
        assert "<!-- examples/" in guide.read_text(), f"{guide.name} shows no example"


def test_every_page_is_in_the_navigation():
    navigation = yaml.safe_load((ROOT / "mkdocs.yml").read_text())["nav"]
    listed = set(re.findall(r"'([\w/.\-]+\.md)'", str(navigation)))
    pages = {str(path.relative_to(ROOT / "docs")) for path in ROOT.glob("docs/**/*.md")}
    assert listed == {page for page in pages if not page.startswith("lab/")}


def compat_rows(heading: str) -> list[list[str]]:
    """The cells of the table below a heading of the compatibility page."""
    section = COMPAT.read_text().split(f"## {heading}\n")[1].split("\n## ")[0]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in section.splitlines() if "|" in line][2:]


def spelled_out(cell: str) -> list[str]:
    return [key.rstrip(".*") for key in re.findall(r"`([\w.*]+)`", cell)]


def test_keys_that_are_called_supported_exist():
    rows = compat_rows("Supported keys")
    for key in (f"{spelled_out(row[0])[0]}.{name}" for row in rows for name in spelled_out(row[1])):
        assert is_known(key), f"{key} is not a key"


def test_every_key_that_both_have_is_called_supported():
    rows = compat_rows("Supported keys")
    listed = {f"{spelled_out(row[0])[0]}.{name}" for row in rows for name in spelled_out(row[1])}
    assert listed == {key for key in keys() if is_verls(key)}


def test_every_default_that_differs_from_verls_is_listed_with_both_values():
    listed = {spelled_out(row[0])[0]: row for row in compat_rows("Other defaults")}
    for key in keys().values():
        if found := re.search(r"\(verl: ([^)]+)\)", key.help):
            assert key.path in listed, f"{key.path} is missing"
            assert f"`{found[1]}`" in listed[key.path][2]


def test_every_rule_for_a_key_of_verl_is_in_the_reference():
    tables = COMPAT.read_text(encoding="utf-8").split("## Other keys of verl\n")[1]
    assert set(re.findall(r"^\| `([\w.*]+)` \|", tables, re.M)) == set(RULES)


def test_verls_python_names_can_be_imported():
    table = COMPAT.read_text().split("## Python names")[1].split("\n## ")[0]
    missing, found = [], 0
    for line in table.splitlines():
        cells = re.match(r"\| `(verl[\w.]*)` \| (.*) \|$", line)
        if cells is None:
            continue
        module = importlib.import_module(cells[1])
        names = re.findall(r"`([A-Za-z_]\w*)`", cells[2])
        found += len(names)
        homes = [module, getattr(module, names[0])]
        missing += [f"{cells[1]}.{name}" for name in names if not any(hasattr(home, name) for home in homes)]
    assert found > 60
    assert not missing
