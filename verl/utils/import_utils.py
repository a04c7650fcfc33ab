"""verl's import path of functions that load users' objects."""

from __future__ import annotations

from typing import Any

from verl.utils.user_code import load_from_file


def load_extern_object(module_path: str, object_name: str) -> Any:
    """The object `object_name` of the file, or of the module in `pkg://package.module`. Raises ConfigError."""
    return load_from_file(module_path, object_name, key="load_extern_object")


def load_extern_type(file_path: str, type_name: str) -> Any:
    """The older name of `load_extern_object`."""
    return load_from_file(file_path, type_name, key="load_extern_type")
