"""Classes that a YAML file or a column names: "module:Class", "module.Class" or "path/to/file.py:Class"."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import yaml

from verl.utils.config import ConfigError


def load_class(target: str, base: type, where: str) -> type[Any]:
    """The subclass of `base` that `target` names; `where` says who asked. Raises ConfigError."""
    separator = ":" if ":" in target else "."
    module_name, _, class_name = target.rpartition(separator)
    if not module_name:
        raise ConfigError(f'{where}: {target!r} is not "module:Class" or "file.py:Class"')
    try:
        module = _module_of_file(module_name) if module_name.endswith(".py") else importlib.import_module(module_name)
    except ImportError as exc:
        raise ConfigError(f"{where}: {module_name!r} cannot be imported: {exc}") from exc
    found = getattr(module, class_name, None)
    if found is None:
        raise ConfigError(f"{where}: {module_name!r} has no class {class_name!r}")
    if not (isinstance(found, type) and issubclass(found, base)):
        raise ConfigError(f"{where}: {target} is not a subclass of {base.__name__}")
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
def _module_of_file(path: str) -> ModuleType:
    file = Path(path).expanduser().resolve()
    name = f"_verl_user_{file.stem}_{abs(hash(str(file)))}"
    spec = importlib.util.spec_from_file_location(name, file)
    if spec is None or spec.loader is None or not file.is_file():
        raise ImportError(f"no such file: {path}")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses and pickle look their module up there
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module
