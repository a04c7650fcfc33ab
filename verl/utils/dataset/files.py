"""Parquet files: where they are, and whether they hold the columns that a run needs."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from verl.utils.builtin import builtin_data, is_builtin
from verl.utils.config import ConfigError, did_you_mean

if TYPE_CHECKING:
    import pyarrow

KEYS = {"train": "data.train_files", "val": "data.val_files"}
BUILTIN_SPLITS = {"train": "train", "val": "test"}


def resolve_data_files(files: str | Sequence[str], split: str = "train") -> list[Path]:
    """The parquet files behind `files`: built-in names, made on first use, and local files.

    `split` is `train` or `val`: a built-in name stands for its training or its held-out part. Raises ConfigError
    naming every file that does not exist.
    """
    names = [files] if isinstance(files, str) else list(files)
    if not names:
        raise ConfigError(f"{KEYS[split]} is empty")
    paths = [
        builtin_data(name, BUILTIN_SPLITS[split]) if is_builtin(name) else Path(name).expanduser().absolute()
        for name in map(str, names)
    ]
    missing = [str(path) for path in paths if not path.is_file()]
    if missing:
        raise ConfigError(
            f"{KEYS[split]}: no such file: {', '.join(missing)}. Data sets are not downloaded: "
            "give local parquet files, or builtin:arithmetic"
        )
    return paths


def read_table(files: Sequence[Path], columns: Sequence[str]) -> pyarrow.Table:
    """The rows of all files. Raises ConfigError for a file that is no parquet, or lacks one of `columns`."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    tables = []
    for path in files:
        try:
            present = pq.read_schema(path).names
        except (pa.ArrowInvalid, OSError) as exc:
            raise ConfigError(f"{path} cannot be read as parquet: {exc}") from exc
        for column in columns:
            if column not in present:
                raise ConfigError(f"{path} has no column {column!r}.{did_you_mean(column, present)}")
        tables.append(pq.read_table(path))
    try:
        return pa.concat_tables(tables, promote_options="permissive")
    except (pa.ArrowInvalid, pa.ArrowTypeError) as exc:
        names = ", ".join(str(path) for path in files)
        raise ConfigError(f"columns of the same name have different types in {names}: {exc}") from exc
