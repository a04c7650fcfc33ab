"""Loads classes and functions by name: "module:Class", "module.Class" or "path/to/file.py:Class"."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from verl.utils.config import ConfigError
from verl.utils.user_code import load_from_file


def load_class(target: str, base: type | tuple[type, ...], where: str) -> type[Any]:
    """The subclass of `base` (or of one of several) named by `target`; `where` is for messages. Raises ConfigError."""
    found = _loaded(target, "Class", where)
    if not (isinstance(found, type) and issubclass(found, base)):
        raise ConfigError(
            f"{where}: {target} is not a subclass of {(base if isinstance(base, type) else base[0]).__name__}"
        )
    return found


def load_function(target: str, where: str) -> Callable[..., Any]:
    """The function named by `target`, as `load_class`. Raises ConfigError."""
    found: Callable[..., Any] = _loaded(target, "function", where)
    if not callable(found):
        raise ConfigError(f"{where}: {target} is not a function")
    return found


def read_yaml(path: str, where: str) -> Any:
    """The content of a YAML file that the configuration names. Raises ConfigError."""
    file = Path(path).expanduser()
    try:
        return yaml.safe_load(file.read_text(encoding="utf-8"))
    except OSError as exc:
        raise ConfigError(f"{where}={path} cannot be read: {exc.strerror}") from exc
    except (yaml.YAMLError, UnicodeDecodeError) as exc:
        raise ConfigError(f"{where}={path} is not YAML: {' '.join(str(exc).split())}") from exc


def read_entries(
    path: str, key: str, kind: str, section: str, known: Sequence[str]
) -> list[tuple[str, dict[str, Any]]]:
    """The entries of the list `section` in a YAML file, each with its name for messages. Raises ConfigError.

    Every entry has `class_name`, and others of the `known` fields. `key` names the file in the configuration; `kind` is
    the word for one entry.
    """
    content = read_yaml(path, key)
    entries = content.get(section) if isinstance(content, dict) else None
    if not isinstance(entries, list) or not entries:
        raise ConfigError(f"{key}={path} holds no list of {section!r}")
    named = [(f"{key}={path}: {kind} {number}", entry) for number, entry in enumerate(entries)]
    for where, entry in named:
        if not isinstance(entry, dict) or not isinstance(entry.get("class_name"), str):
            raise ConfigError(f"{where} lacks 'class_name': {entry!r}")
        if unknown := sorted(set(entry) - set(known)):
            raise ConfigError(f"{where}: unknown {unknown}; known: {', '.join(known)}")
    return named


def _loaded(target: str, kind: str, where: str) -> Any:
    separator = ":" if ":" in target else "."
    module_name, _, name = target.rpartition(separator)
    if not module_name:
        raise ConfigError(f'{where}: {target!r} is not "module:{kind}" or "file.py:{kind}"')
    if module_name.endswith(".py"):
        found = _from_file(module_name, name, where)
    else:
        try:
            found = getattr(importlib.import_module(module_name), name, None)
        except ImportError as exc:
            raise ConfigError(f"{where}: {module_name!r} cannot be imported: {exc}") from exc
    if found is None:
        raise ConfigError(f"{where}: {module_name!r} has no {kind.lower()} {name!r}")
    return found


@cache
def _from_file(path: str, name: str, where: str) -> Any:
    """Run the file once per process and name, not once per sample."""
    return load_from_file(path, name, key=where)
