"""The checkpoint engine is installed under two import names, so none of its files may say which."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

PACKAGE = Path(__file__).resolve().parents[2] / "verl/checkpoint_engine"


def absolute_names(source: str) -> Iterator[str]:
    """Imports of this project that are not relative, and strings that name a module of it. Docstrings may."""
    tree = ast.parse(source)
    docstrings = {
        id(node.body[0].value)
        for node in ast.walk(tree)
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef))
        if node.body and isinstance(node.body[0], ast.Expr)
    }
    for node in ast.walk(tree):
        match node:
            case ast.Import(names=names):
                yield from (name.name for name in names if name.name.split(".")[0] == "verl")
            case ast.ImportFrom(level=0, module=str(module)) if module.split(".")[0] == "verl":
                yield module
            case ast.Constant(value=str(text)) if "verl.checkpoint_engine" in text and id(node) not in docstrings:
                yield text


def test_no_file_of_the_checkpoint_engine_says_under_which_name_it_is_installed():
    files = sorted(PACKAGE.rglob("*.py"))
    assert len(files) > 100
    found = [f"{path.relative_to(PACKAGE)}: {name}" for path in files for name in absolute_names(path.read_text())]
    assert found == []


def test_every_way_to_say_it_is_found():
    said = '''
"""`verl.checkpoint_engine.update` in a docstring."""
import verl.envs
from verl import envs
from verl.utils.config import option
from verl_other import name
from ..errors import PlanError

def backend():
    """As verl.checkpoint_engine has it."""
    return importlib.import_module(f"verl.checkpoint_engine.{name}")
'''
    assert sorted(absolute_names(said)) == ["verl", "verl.checkpoint_engine.", "verl.envs", "verl.utils.config"]
