"""Code of Python that documents print: all of it compiles, what it imports is there, and what is whole runs."""

from __future__ import annotations

import ast
import importlib
import re
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from tests.cli.runs import write_run
from tests.docs.printed import ROOT, pages

BLOCKS = [
    (str(path.relative_to(ROOT)), textwrap.dedent(block))
    for path in pages()
    for block in re.findall(r"(?ms)^```python\n(.*?)\n```$", path.read_text(encoding="utf-8"))
]


@pytest.mark.parametrize(("page", "block"), BLOCKS, ids=[page for page, _ in BLOCKS])
def test_a_block_compiles_and_its_imports_are_there(page: str, block: str):
    tree = compile(block, page, "exec", ast.PyCF_ONLY_AST | ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] in ("verl", "verl_sync"):
            module = importlib.import_module(re.sub(r"^verl_sync\b", "verl.checkpoint_engine", node.module or ""))
            assert [name.name for name in node.names if not hasattr(module, name.name)] == []


def test_the_rows_of_the_page_on_data_become_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (block,) = [block for page, block in BLOCKS if page == "docs/data.md"]
    monkeypatch.chdir(tmp_path)
    exec(block, {})
    assert (tmp_path / "train.parquet").is_file()


def test_the_lines_that_show_reports_of_syncs_run(tmp_path: Path):
    write_run(tmp_path / "checkpoints/verl_sync/default")
    page = (ROOT / "docs/weight_sync.md").read_text(encoding="utf-8")
    (lines,) = re.findall(r"(?ms)^\.venv/bin/python - <<'EOF'\n(.*?)^EOF$", page)
    done = subprocess.run([sys.executable, "-c", lines], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert re.match(r"\d+ committed \d\.\d{3} s: .*stage 1\.000", done.stdout), done.stdout
