"""What files held when they were written, noted in a file beside them: sizes, and xxh3 digests of their bytes."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from pathlib import Path

import xxhash

_NAME = "digests*.json"
_CHUNK = 2**24


def write_digests(directory: Path, names: Iterable[str], file: str = "digests.json") -> None:
    """Of `names` in `directory`, as they are now. `file` is named `digests*.json`: each writer has its own."""
    found = {name: [(directory / name).stat().st_size, _digest(directory / name)] for name in sorted(names)}
    (directory / file).write_text(json.dumps(found))


def noted_in(directory: Path, parts: Iterable[str]) -> list[Path]:
    """What `write_digests` has left in those directories of it."""
    return [file for part in parts for file in sorted((directory / part).glob(_NAME))]


def damaged(directory: Path, *, bytes_up_to: int | None = None, share: tuple[int, int] = (0, 1)) -> str:
    """What is wrong with a file of `directory`, by its name; empty if nothing is, or nobody has noted anything.

    `bytes_up_to`: where the files have more bytes together, only their sizes are compared; None: bytes always are.
    `share`: (number, count): of `count` callers each compares another part of the files.
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
        for name, (nbytes, digest) in json.loads(file.read_text()).items():
            yield str(name), (int(nbytes), str(digest))


def _digest(path: Path) -> str:
    found = xxhash.xxh3_128()
    with path.open("rb") as opened:
        while chunk := opened.read(_CHUNK):
            found.update(chunk)
    return found.hexdigest()
