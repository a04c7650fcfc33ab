"""Hooks of mkdocs, which turns docs/ into a site."""

from __future__ import annotations

import re
import subprocess
from contextlib import suppress
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
CODE = re.compile(r"`[^`\n]+`")


def on_config(config: Any) -> Any:
    """Link to the repository that this one was cloned from, if it is on the web."""
    command = ["git", "-C", str(ROOT), "config", "--get", "remote.origin.url"]
    remote = ""
    with suppress(FileNotFoundError):  # a machine without git
        remote = subprocess.run(command, capture_output=True, text=True, check=False).stdout
    if address := web_address(remote.strip()):
        config.repo_url = address
        config.repo_name = "/".join(address.split("/")[3:])
    return config


def web_address(remote: str) -> str | None:
    """The page of a remote of git, without credentials; None for a directory."""
    found = re.fullmatch(r"(?:https://(?:[^@/]*@)?|(?:ssh://)?git@)([\w.-]+)[:/](.+?)(?:\.git)?/?", remote)
    return f"https://{found[1]}/{found[2]}" if found else None


def on_page_markdown(markdown: str, **_: Any) -> str:
    r"""Write union types in tables as Python-Markdown reads them.

    A pipe in the code of a table is escaped for GitHub (`str \| None`); Python-Markdown would show the backslash.
    """
    lines = markdown.split("\n")
    return "\n".join(CODE.sub(_without_escapes, line) if line.startswith("|") else line for line in lines)


def _without_escapes(code: re.Match[str]) -> str:
    return code[0].replace("\\|", "|")
