"""Text is UTF-8 whatever the locale is: a chat template read as Latin-1 would be another one, without a word."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
OURS = ("verl", "recipe", "distributions")
METHODS = ("read_text", "write_text")


def by_locale(tree: ast.AST) -> Iterator[int]:
    """The lines of calls that decode or encode as the locale says."""
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call) or any(word.arg == "encoding" for word in node.keywords):
            continue
        called = node.func
        if isinstance(called, ast.Attribute) and called.attr in METHODS:
            if len(node.args) <= METHODS.index(called.attr):
                yield node.lineno
        elif isinstance(called, ast.Name) and called.id == "open":
            if len(node.args) == 1 or is_text(node.args[1]):
                yield node.lineno
        elif isinstance(called, ast.Attribute) and called.attr in ("open", "fdopen") and any(map(is_text, node.args)):
            yield node.lineno


def is_text(mode: ast.expr) -> bool:
    return isinstance(mode, ast.Constant) and mode.value in ("r", "w", "a", "x", "r+", "w+", "a+")


@pytest.mark.parametrize(
    ("code", "found"),
    [
        ("path.read_text()", True),
        ("path.read_text(errors='replace')", True),
        ("path.read_text('utf-8')", False),
        ("path.write_text(text)", True),
        ("path.write_text(text, 'utf-8')", False),
        ("open(path)", True),
        ("open(path, 'w')", True),
        ("open(path, 'rb')", False),
        ("open(path, encoding='utf-8')", False),
        ("path.open('a+')", True),
        ("os.fdopen(number, 'w')", True),
        ("picture.open()", False),
    ],
)
def test_a_call_that_depends_on_the_locale_is_found(code, found):
    assert list(by_locale(ast.parse(code))) == [1] * found


def test_no_text_is_read_or_written_as_the_locale_says():
    files = [file for name in OURS for file in (ROOT / name).rglob("*.py")]
    assert len(files) > 500
    found = [f"{file.relative_to(ROOT)}:{line}" for file in files for line in by_locale(ast.parse(file.read_bytes()))]
    assert found == []
