"""Find the files of a checkpoint in a Hugging Face directory. No torch."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

import msgspec

from ..errors import ConfigError
from ..plan.encoded import UNREADABLE
from ..plan.layout import listed
from ..support.files import read_regular
from .safetensors_files import read_checkpoint

INDEX = "model.safetensors.index.json"
LONGEST_NAME_NBYTES = 255

State = tuple[int, int]
"""The size of a file in bytes, and the time of its last change in nanoseconds."""


def checkpoint_files(directory: Path) -> list[Path]:
    """The safetensors files of a Hugging Face checkpoint: those that its index names, else all. Raises ConfigError."""
    index = directory / INDEX
    if not index.exists():
        files = sorted(directory.glob("*.safetensors"))
        if not files:
            what = "has no *.safetensors files" if directory.is_dir() else "is not a directory"
            raise ConfigError(f"{directory} {what}")
        return files
    try:
        weight_map = msgspec.json.decode(read_regular(index), type=dict[str, object])["weight_map"]
        of_tensor = msgspec.convert(weight_map, dict[str, str])
    except (OSError, KeyError, *UNREADABLE) as exc:
        raise ConfigError(f"{index} is not the index of a checkpoint: {exc}") from exc
    if strange := sorted(file for file in set(of_tensor.values()) if not _is_file_name(file)):
        raise ConfigError(f"{index} names files that are not in {directory}: {listed(list(map(repr, strange)))}")
    files = [directory / file for file in sorted(set(of_tensor.values()))]
    missing = [file.name for file in files if not file.exists()]
    if missing:
        raise ConfigError(
            f"{directory} lacks {len(missing)} of the {len(files)} files in {INDEX}: {', '.join(missing)}"
        )
    absent = sorted(of_tensor.keys() - {tensor.name for tensor in read_checkpoint(files)})
    if absent:
        raise ConfigError(f"{directory} lacks {len(absent)} of the tensors in {INDEX}: {', '.join(absent)}")
    return files


def states_of(files: Iterable[Path]) -> dict[str, State]:
    """The state of each file, by absolute path. Raises ConfigError for a missing file."""
    try:
        return {str(file.resolve()): (file.stat().st_size, file.stat().st_mtime_ns) for file in files}
    except OSError as exc:
        raise ConfigError(f"{exc.filename}: {exc.strerror}") from exc


def unchanged(states: Mapping[str, State]) -> list[Path]:
    """The files of `states`. Raises ConfigError if a file is missing, or has changed since."""
    now = states_of(map(Path, states))
    if other := [file for file, state in states.items() if now.get(file) != tuple(state)]:
        raise ConfigError(f"not the files that they were when the update began: {listed(other)}")
    return [Path(file) for file in states]


def _is_file_name(name: str) -> bool:
    """Of a file in the directory itself, that a file system may have."""
    return Path(name).name == name and "\0" not in name and len(name.encode(errors="replace")) <= LONGEST_NAME_NBYTES
