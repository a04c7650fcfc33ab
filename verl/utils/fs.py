"""verl's name for bringing files to this machine. Everything is a local path here."""

from __future__ import annotations

from pathlib import Path

from verl.utils.config import ConfigError


def copy_to_local(src: str, cache_dir: str | None = None, **kwargs: object) -> str:
    """`src`, which is here already. Raises ConfigError for a path of another file system, such as hdfs://."""
    if "://" in str(src):
        raise ConfigError(f"{src} is not a path of this machine: copy it here and name the copy")
    return str(Path(src).expanduser())


copy_local_path_from_hdfs = copy_to_local
"""Its older name."""


def is_non_local(path: str) -> bool:
    """Whether it is a path of hdfs://."""
    return path.startswith("hdfs://")


def local_mkdir_safe(path: str) -> str:
    """Makes the directory, unless another process has."""
    Path(path).mkdir(parents=True, exist_ok=True)
    return path
