"""Finds data files and reads their rows. Distinguishes Parquet and JSON Lines by content."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from copy import copy
from glob import glob
from pathlib import Path
from typing import TYPE_CHECKING, Any

from verl.utils.builtin import builtin_data, is_builtin
from verl.utils.config import ConfigError, did_you_mean

if TYPE_CHECKING:
    import pyarrow

KEYS = {"train": "data.train_files", "val": "data.val_files"}
BUILTIN_SPLITS = {"train": "train", "val": "test"}
PARQUET = b"PAR1"
GIT_LFS = b"version https://git-lfs.github.com/spec/"
SHOWN_FILES = 3
ROWS_AT_ONCE = 64
"""Rows read at once of a column with pictures, which may have megabytes each."""
Lighten = Mapping[str, Callable[[Any], Any]]
"""A column, and a function that makes each of its values smaller."""


def resolve_data_files(files: str | Sequence[str], split: str = "train") -> list[Path]:
    """The files behind `files`: built-in names, made on first use, and local files.

    `split` is `train` or `val`: a built-in name stands for its training or its held-out part. Raises ConfigError
    naming every file that does not exist, and the first that is a directory.
    """
    names = [files] if isinstance(files, str) else list(files)
    if not names or "" in names:
        raise ConfigError(f"{KEYS[split]} is not set: give parquet or JSON Lines files, as data.train_files has them")
    paths = [
        builtin_data(name, BUILTIN_SPLITS[split]) if is_builtin(name) else Path(name).expanduser().absolute()
        for name in map(str, names)
    ]
    for path in paths:
        if path.is_dir():
            inside = sorted(each.name for each in path.iterdir() if each.suffix in (".parquet", ".jsonl"))
            shown = ", ".join(inside[:SHOWN_FILES]) + (", ..." if len(inside) > SHOWN_FILES else "")
            raise ConfigError(
                f"{KEYS[split]}: {path} is a directory; name the files in it ({shown or 'it has no data files'})"
            )
    missing = [str(path) for path in paths if not path.is_file()]
    if missing:
        if found := sorted(glob(missing[0])):  # it exists by another name, which has to be a pattern
            shown = ",".join(found[:SHOWN_FILES]) + (",..." if len(found) > SHOWN_FILES else "")
            raise ConfigError(f"{KEYS[split]}: {missing[0]} is a pattern; give its files: {KEYS[split]}=[{shown}]")
        raise ConfigError(
            f"{KEYS[split]}: no such file: {', '.join(missing)}. Data sets are not downloaded: "
            "give local parquet or JSON Lines files, or builtin:arithmetic"
        )
    return paths


class Rows:
    """The rows of several files, one after another, as dicts with the columns of all of them.

    A file keeps its own types: a column may be text in one and a number in the next.
    """

    def __init__(
        self,
        files: Sequence[Path],
        columns: Sequence[str],
        lighten: Lighten | None = None,
        remedy: Callable[[Path, dict[str, Any]], str] = lambda *_: "",
    ) -> None:
        """Applies `lighten` while the files are read, a few rows at a time. `remedy` returns the advice for a missing
        column, from a file's first row.

        Raises ConfigError for a file without one of `columns`, or that cannot be read."""
        self._parts: list[tuple[Path, _Part]] = []
        for path in files:
            part = _read(path, lighten)
            for column in columns:
                if column not in part.columns:
                    near = did_you_mean(column, part.columns)
                    raise ConfigError(f"{path} has no column {column!r}.{near}{remedy(path, part.read(0, 1)[0])}")
            self._parts.append((path, part))
        self._chosen: Sequence[int] = range(sum(len(part) for _, part in self._parts))
        self._columns = list(dict.fromkeys(name for _, part in self._parts for name in part.columns))

    @property
    def columns(self) -> list[str]:
        """The columns of all files."""
        return list(self._columns)

    def __len__(self) -> int:
        return len(self._chosen)

    def __getitem__(self, row: int) -> dict[str, Any]:
        [found] = self._read(self._chosen[row], self._chosen[row] + 1)
        return found

    def select(self, rows: Sequence[int]) -> Rows:
        """The given rows, in this order."""
        chosen = copy(self)
        chosen._chosen = [self._chosen[row] for row in rows]
        return chosen

    def read(self, start: int, stop: int) -> list[dict[str, Any]]:
        """The rows in [start, stop), each with every column."""
        chosen = self._chosen[start:stop]
        if isinstance(chosen, range):
            return self._read(chosen.start, chosen.stop)
        return [row for each in chosen for row in self._read(each, each + 1)]

    def _read(self, start: int, stop: int) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = []
        first = 0
        for _, part in self._parts:
            low, high = max(start - first, 0), min(stop - first, len(part))
            if low < high:
                found += part.read(low, high)
            first += len(part)
        return [dict.fromkeys(self._columns) | row for row in found]

    def place(self, row: int) -> str:
        """The place of a row, for the user: `row 3 of train.parquet` (from 0) or `line 4 of train.jsonl` (from 1)."""
        row = self._chosen[row]
        for path, part in self._parts:
            if row < len(part):
                return f"{part.place(row)} of {path}"
            row -= len(part)
        raise IndexError(row)


class _Parquet:
    def __init__(self, table: pyarrow.Table, apart: Mapping[str, Sequence[Any]] | None = None) -> None:
        """`apart` are columns that are not in `table`."""
        self._table = table
        self._apart = dict(apart or {})
        self.columns: list[str] = [*table.column_names, *self._apart]

    def __len__(self) -> int:
        rows: int = self._table.num_rows
        return rows

    def read(self, start: int, stop: int) -> list[dict[str, Any]]:
        rows: list[dict[str, Any]] = self._table.slice(start, stop - start).to_pylist()
        for name, values in self._apart.items():
            for row, value in zip(rows, values[start:stop], strict=True):
                row[name] = value
        return rows

    def place(self, row: int) -> str:
        return f"row {row}"


class _JsonLines:
    def __init__(self, rows: Sequence[tuple[int, dict[str, Any]]]) -> None:
        """`rows` have their line numbers, from 1."""
        self._rows = rows
        self.columns = list(dict.fromkeys(name for _, row in rows for name in row))

    def __len__(self) -> int:
        return len(self._rows)

    def read(self, start: int, stop: int) -> list[dict[str, Any]]:
        return [row for _, row in self._rows[start:stop]]

    def place(self, row: int) -> str:
        return f"line {self._rows[row][0]}"


_Part = _Parquet | _JsonLines


def _read(path: Path, lighten: Lighten | None) -> _Part:
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            beginning = file.read(len(GIT_LFS)).removeprefix(b"\xef\xbb\xbf").lstrip()
            file.seek(max(0, size - len(PARQUET)))
            end = file.read()
    except OSError as exc:
        raise ConfigError(f"{path} cannot be read: {exc.strerror}") from exc
    if size == 0:
        raise ConfigError(f"{path} is empty: it has 0 bytes")
    if beginning.startswith(GIT_LFS):
        raise ConfigError(f"{path} is a git-lfs pointer, not the file itself: run `git lfs pull` where it is")
    if beginning.startswith(PARQUET):
        if end != PARQUET or size < 3 * len(PARQUET):
            raise ConfigError(f"{path} is truncated: it begins as a parquet file of which the end is missing")
        part: _Part = _read_parquet(path, lighten)
    elif beginning.startswith(b"{"):
        part = _read_json_lines(path, lighten)
    else:
        remedy = ""
        if beginning.startswith(b"["):
            remedy = f": it begins as one JSON list; `jq -c '.[]' {path.name}` writes its rows as lines"
        raise ConfigError(f"{path} cannot be read: it is neither parquet nor JSON Lines{remedy}")
    if not len(part):
        raise ConfigError(f"{path} has no rows")
    return part


def _read_parquet(path: Path, lighten: Lighten | None) -> _Parquet:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        file = pq.ParquetFile(path)
        columns = file.schema_arrow.names
        light = {
            name: [
                make(value)
                for batch in file.iter_batches(batch_size=ROWS_AT_ONCE, columns=[name])
                for value in batch.column(0).to_pylist()
            ]
            for name, make in (lighten or {}).items()
            if name in columns
        }
        return _Parquet(file.read(columns=[each for each in columns if each not in light]), light)
    except (pa.ArrowException, OSError) as exc:
        raise ConfigError(f"{path} cannot be read as parquet, it may be truncated or damaged: {exc}") from exc


def _read_json_lines(path: Path, lighten: Lighten | None) -> _JsonLines:
    rows: list[tuple[int, dict[str, Any]]] = []
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            try:
                row = json.loads(line.decode("utf-8-sig"))
            except (ValueError, RecursionError) as exc:  # also what is no UTF-8
                cut = "" if line.endswith(b"\n") else "; it is the last line: the file may be truncated"
                raise ConfigError(f"line {number} of {path} is not JSON: {exc}{cut}") from exc
            if not isinstance(row, dict):
                raise ConfigError(f"line {number} of {path} is no JSON object: {str(row)[:80]!r}")
            row |= {name: make(row[name]) for name, make in (lighten or {}).items() if name in row}
            rows.append((number, row))
    return _JsonLines(rows)
