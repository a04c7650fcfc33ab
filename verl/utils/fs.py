"""verl's functions that copy files to this machine. Here every path is local."""

from __future__ import annotations

from pathlib import Path

from verl.utils.config import ConfigError


def copy_to_local(src: str, cache_dir: str | None = None, **kwargs: object) -> str:
    """`src` itself, which is local. Raises ConfigError for a path of another file system, such as hdfs://."""
    if "://" in str(src):
        raise ConfigError(f"{src} is not a path of this machine: copy it here and name the copy")
    return str(Path(src).expanduser())


copy_local_path_from_hdfs = copy_to_local
"""The older name of `copy_to_local`."""


def is_non_local(path: str) -> bool:
    """Whether the path is on hdfs://."""
    return path.startswith("hdfs://")


def local_mkdir_safe(path: str) -> str:
    """Create the directory if it does not exist, safely among processes."""
    Path(path).mkdir(parents=True, exist_ok=True)
    return path
