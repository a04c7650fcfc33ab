"""Hooks of mkdocs, which turns docs/ into a site."""

from __future__ import annotations

import re
from typing import Any

CODE = re.compile(r"`[^`\n]+`")


def on_page_markdown(markdown: str, **_: Any) -> str:
    r"""Write union types in tables as Python-Markdown reads them.

    A pipe in the code of a table is escaped for GitHub (`str \| None`); Python-Markdown would show the backslash.
    """
    lines = markdown.split("\n")
    return "\n".join(CODE.sub(_without_escapes, line) if line.startswith("|") else line for line in lines)


def _without_escapes(code: re.Match[str]) -> str:
    return code[0].replace("\\|", "|")
