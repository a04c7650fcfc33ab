"""Records sizes and xxh3 digests of files when they are written, in a file beside them."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from pathlib import Path

import xxhash

_NAME = "digests*.json"
_CHUNK = 2**24


def write_digests(directory: Path, names: Iterable[str], file: str = "digests.json") -> None:
    """Write the digests of `names` in `directory`. `file` is named `digests*.json`: each writer has its own."""
    found = {name: [(directory / name).stat().st_size, _digest(directory / name)] for name in sorted(names)}
    (directory / file).write_text(json.dumps(found), "utf-8")


def noted_in(directory: Path, parts: Iterable[str]) -> list[Path]:
    """The files of `write_digests` in these subdirectories."""
    return [file for part in parts for file in sorted((directory / part).glob(_NAME))]


def damaged(directory: Path, *, bytes_up_to: int | None = None, share: tuple[int, int] = (0, 1)) -> str:
    """The first file of `directory` that differs from its record, and how; empty without differences or records.

    If the files have more than `bytes_up_to` in total, compares only their sizes; None always compares digests. `share`
    is (number, count): each of `count` callers compares another part of the files.
    """
    try:
        noted = dict(_noted(directory))
    except (OSError, ValueError, TypeError, AttributeError) as exc:
        return f"what {directory} notes of its files cannot be read: {exc}"
    total = sum(nbytes for nbytes, _ in noted.values())
    number, count = share
    for name, (nbytes, digest) in sorted(noted.items())[number::count]:
        path = directory / name
        try:
            size = path.stat().st_size
            if size != nbytes:
                return f"{path} has {size} bytes, and had {nbytes} when it was written"
            if (bytes_up_to is None or total <= bytes_up_to) and _digest(path) != digest:
                return f"{path} has other bytes than when it was written"
        except OSError as exc:
            return f"{path} cannot be read: {exc.strerror}"
    return ""


def _noted(directory: Path) -> Iterator[tuple[str, tuple[int, str]]]:
    for file in noted_in(directory, [""]):
        for name, (nbytes, digest) in json.loads(file.read_text("utf-8")).items():
            yield str(name), (int(nbytes), str(digest))


def _digest(path: Path) -> str:
    found = xxhash.xxh3_128()
    with path.open("rb") as opened:
        while chunk := opened.read(_CHUNK):
            found.update(chunk)
    return found.hexdigest()
