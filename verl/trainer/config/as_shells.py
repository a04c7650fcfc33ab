"""What a shell or Python would make of a value, and Hydra does not: `~`, and `None` for null."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from verl.trainer.config.schema import keys

_OF_PATHS = ("path", "_dir", "_file", "_files")
"""Ends of keys whose values are paths."""


def with_homes(values: Mapping[str, Any]) -> dict[str, Any]:
    """`values` with the home directory in place of `~` at the beginning of a path; shells leave `key=~/x` as it is."""
    return {name: _at_home(value, name) for name, value in values.items()}


def _at_home(value: Any, name: str) -> Any:
    if isinstance(value, Mapping):
        return with_homes(value)
    if not name.endswith(_OF_PATHS):
        return value
    if isinstance(value, list):
        return [_at_home(each, name) for each in value]
    try:
        return str(Path(value).expanduser()) if isinstance(value, str) and value.startswith("~") else value
    except RuntimeError:  # nobody of that name
        return value


def take_none(values: dict[str, Any], problems: list[str]) -> None:
    """Set keys that are null by default to null where `values` has the word None, and add a line to `problems`."""
    for path, key in keys().items():
        *sections, name = path.split(".")
        section: Any = values
        for each in sections:
            section = section.get(each) if isinstance(section, Mapping) else None
        if key.default is None and isinstance(section, dict) and section.get(name) == "None":
            section[name] = None
            problems.append(f"{path}=None: None is a word here; write null")
