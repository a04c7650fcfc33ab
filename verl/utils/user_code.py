"""Loads users' functions and classes from a Python file that the configuration names."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

from verl.utils.config import ConfigError, did_you_mean
from verl.utils.failures import NamedFailure

MODULE = "pkg://"


class UserCodeError(NamedFailure, RuntimeError):
    """The user's code failed in a run. The message has all that is needed to fix it."""


def load_from_file(path: str | Path, name: str, *, key: str) -> Any:
    """The object `name` that the file at `path`, or the module in `pkg://package.module`, defines; `key` is the
    configuration section, for messages.

    Raises ConfigError if the file is missing, fails when it is run, or defines no such name.
    """
    module = _run_file(Path(path).expanduser(), key) if not is_module(path) else _imported(str(path), key)
    if not hasattr(module, name):
        defined = [each for each, value in vars(module).items() if _defined_in(module, each, value)]
        raise ConfigError(f"{key}.name={name!r} is not defined in {path}.{did_you_mean(name, defined)}")
    return getattr(module, name)


def not_a_file(path: str | Path, key: str) -> str | None:
    """What is wrong with `path`, the value of `key`, if it is no file."""
    file = Path(path).expanduser().absolute()
    if file.is_dir():
        return f"{key}={file} is a directory: name the file in it"
    return None if file.is_file() else f"{key}={file}: no such file"


def is_module(path: str | Path) -> bool:
    """Whether the path names an installed module, in verl's notation."""
    return str(path).startswith(MODULE)


def _imported(path: str, key: str) -> ModuleType:
    try:
        return importlib.import_module(path.removeprefix(MODULE))
    except Exception as exc:
        raise ConfigError(f"{key}.path={path!r} cannot be imported: {type(exc).__name__}: {exc}") from exc


def _run_file(path: Path, key: str) -> ModuleType:
    if missing := not_a_file(path, f"{key}.path"):
        raise ConfigError(missing)
    module_name = f"verl_user_{path.stem}"
    spec = importlib.util.spec_from_file_location(module_name, path)
    if spec is None or spec.loader is None:
        raise ConfigError(f"{key}.path={str(path)!r} is not a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[module_name] = module  # dataclasses and pickle look their module up by name
    try:
        spec.loader.exec_module(module)
    except Exception as exc:
        del sys.modules[module_name]
        raise ConfigError(f"{key}.path={str(path)!r} cannot be loaded: {type(exc).__name__}: {exc}") from exc
    return module


def _defined_in(module: ModuleType, name: str, value: Any) -> bool:
    return callable(value) and not name.startswith("_") and getattr(value, "__module__", None) == module.__name__
