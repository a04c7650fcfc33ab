"""JSON Lines files of a run's records. A resumed run keeps the records that are still valid and appends to them."""

from __future__ import annotations

import json
import logging
import math
import os
import reprlib
import shutil
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

logger = logging.getLogger(__name__)

MOST_LEVELS = 50
"""The deepest nesting of lists; deeper or recursive values are written as text."""


def append(path: Path, records: Iterable[bytes], what: str | None = None) -> None:
    """Append a line for each JSON text, or none at all: half a line would damage the next one.

    If the disk is full, it logs a warning about `what`, and the run goes on without these lines.
    """
    lines = [record + b"\n" for record in records]
    if not lines:
        return
    try:
        handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
        try:
            _write_whole(handle, b"".join(lines))
        finally:
            os.close(handle)
    except OSError as exc:
        what = what or f"{len(lines)} records are"
        logger.error("%s not in %s: %s", what, path, exc)  # noqa: TRY400 - told in one line


def _write_whole(handle: int, data: bytes) -> None:
    before = os.fstat(handle).st_size
    written = 0
    try:
        while written < len(data):
            written += os.write(handle, data[written:])
    except OSError:
        if written:
            os.ftruncate(handle, before)
        raise


def encoded(record: Mapping[str, Any]) -> bytes:
    """Encode as standard JSON: NaN and infinities become null, numbers of numpy and torch numbers, other types text."""
    try:
        return json.dumps(record, default=_plain, allow_nan=False).encode()
    except (ValueError, TypeError, RecursionError):
        return json.dumps(_simple(record)).encode()


def _plain(value: Any) -> Any:
    """Numbers and lists from whatever has `tolist`, as arrays, tensors and their scalars do; else its text."""
    return value.tolist() if hasattr(value, "tolist") else str(value)


def _simple(value: Any, depth: int = 0) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if depth < MOST_LEVELS and isinstance(value, Mapping):
        return {str(key): _simple(item, depth + 1) for key, item in value.items()}
    if depth < MOST_LEVELS and isinstance(value, (list, tuple)):
        return [_simple(item, depth + 1) for item in value]
    plain = _plain(value) if depth < MOST_LEVELS else reprlib.repr(value)
    return plain if isinstance(plain, str) else _simple(plain, depth + 1)


def read(path: Path, what: str = "record") -> tuple[list[dict[str, Any]], bool]:
    """The records in file order, and whether the last line is complete; an incomplete one is left out.

    Raises FileNotFoundError, and ValueError naming the line for anything else that is not an object.
    """
    lines = path.read_bytes().split(b"\n")
    complete = lines.pop() == b""
    found = []
    for number, line in enumerate(lines, start=1):
        try:
            record = json.loads(line)
        except (ValueError, RecursionError):
            record = None
        if not isinstance(record, dict):
            raise ValueError(f"{path}, line {number}: not a {what}: {line[:80]!r}")  # noqa: TRY004 - of the file's content
        found.append(record)
    return found, complete


def carry_over(path: Path, keep: Callable[[dict[str, Any]], bool]) -> None:
    """Keep the earlier run's records for which `keep` is true. If it drops any, the old file stays as `<stem>-<n>`.

    A file with other content is moved aside with a warning; no run fails for it.
    """
    try:
        found, complete = read(path)
    except FileNotFoundError:
        return
    except (OSError, ValueError) as exc:
        logger.warning("%s; the file is put aside", exc)
        path.rename(_free_name(path))
        return
    kept = [record for record in found if keep(record)]
    if len(kept) < len(found) or not complete:
        shutil.copyfile(path, _free_name(path))
        rewrite(path, kept)


def rewrite(path: Path, records: Iterable[Mapping[str, Any]]) -> None:
    """Replace the content of a file atomically: after a kill it has the old content or the new one."""
    partial = path.with_name(f".{path.name}.partial")
    partial.write_bytes(b"".join(encoded(record) + b"\n" for record in records))
    partial.rename(path)


def _free_name(path: Path) -> Path:
    number = 1
    while (free := path.with_name(f"{path.stem}-{number}{path.suffix}")).exists():
        number += 1
    return free
