"""Classes that a YAML file or a column names: "module:Class", "module.Class" or "path/to/file.py:Class"."""

from __future__ import annotations

import importlib
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from verl.utils.config import ConfigError
from verl.utils.user_code import load_from_file


def load_class(target: str, base: type | tuple[type, ...], where: str) -> type[Any]:
    """The subclass of `base`, or of one of several, that `target` names; `where` says who asked. Raises ConfigError."""
    separator = ":" if ":" in target else "."
    module_name, _, class_name = target.rpartition(separator)
    if not module_name:
        raise ConfigError(f'{where}: {target!r} is not "module:Class" or "file.py:Class"')
    if module_name.endswith(".py"):
        found = _from_file(module_name, class_name, where)
    else:
        try:
            found = getattr(importlib.import_module(module_name), class_name, None)
        except ImportError as exc:
            raise ConfigError(f"{where}: {module_name!r} cannot be imported: {exc}") from exc
    if found is None:
        raise ConfigError(f"{where}: {module_name!r} has no class {class_name!r}")
    if not (isinstance(found, type) and issubclass(found, base)):
        raise ConfigError(
            f"{where}: {target} is not a subclass of {(base if isinstance(base, type) else base[0]).__name__}"
        )
    return found


def read_yaml(path: str, where: str) -> Any:
    """The content of a YAML file that the configuration names. Raises ConfigError."""
    file = Path(path).expanduser()
    try:
        return yaml.safe_load(file.read_text(encoding="utf-8"))
    except OSError as exc:
        raise ConfigError(f"{where}={path} cannot be read: {exc.strerror}") from exc
    except yaml.YAMLError as exc:
        raise ConfigError(f"{where}={path} is not YAML: {' '.join(str(exc).split())}") from exc


@cache
def _from_file(path: str, name: str, where: str) -> Any:
    """Run the file once per process and name, not once per sample."""
    return load_from_file(path, name, key=where)
