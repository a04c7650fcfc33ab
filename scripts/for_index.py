"""Makes a copy of this repository fit for a package index, which shows README.md where no other file of it is.

    python scripts/for_index.py FOLDER [URL]

With the URL of the public repository, links and pictures lead there, to the tag of this version, and the metadata name
it. Without, pictures are left out and of a link its text stays.
"""

from __future__ import annotations

import posixpath
import re
import sys
import tomllib
from pathlib import Path

DISTRIBUTIONS = ("", "distributions/verl_sync")
RELATIVE = re.compile(r"(?P<picture>!?)\[(?P<text>[^\]]*)\]\((?!https?:|mailto:|#)(?P<path>[^)\s]+)\)")


def absolute(readme: str, folder: str, tag: str, url: str | None) -> str:
    """`readme`, which lies in `folder` of the repository, without links that are relative."""

    def link(found: re.Match[str]) -> str:
        picture, text, path = found["picture"], found["text"], found["path"]
        if url is None:
            return "" if picture else text
        return f"{picture}[{text}]({url}/{'raw' if picture else 'blob'}/{tag}/{posixpath.normpath(f'{folder}/{path}')})"

    return re.sub(r"\n{3,}", "\n\n", RELATIVE.sub(link, readme))


def urls(tag: str, url: str) -> str:
    """A table for pyproject.toml."""
    return f"""
[project.urls]
Repository = "{url}"
Documentation = "{url}/blob/{tag}/docs/index.md"
Changelog = "{url}/blob/{tag}/CHANGELOG.md"
Issues = "{url}/issues"
"""


def prepare(folder: Path, url: str | None) -> None:
    for name in DISTRIBUTIONS:
        project, readme = folder / name / "pyproject.toml", folder / name / "README.md"
        described = tomllib.loads(project.read_text())["project"]
        tag = f"v{described['version']}"
        readme.write_text(absolute(readme.read_text(), name or ".", tag, url))
        if url is not None and "urls" not in described:
            project.write_text(project.read_text() + urls(tag, url))


def main() -> int:
    folder, *given = sys.argv[1:]
    url = given[0].rstrip("/") if given else None
    if url is not None and not re.fullmatch(r"https://[\w.-]+/[\w./-]+", url):
        sys.stderr.write(f"error: {url!r} is not the URL of a repository, such as https://github.com/NAME/verl-sync\n")
        return 1
    prepare(Path(folder), url)
    return 0


if __name__ == "__main__":
    sys.exit(main())
