"""verl's place for what loads objects of the user's own."""

from __future__ import annotations

from typing import Any

from verl.utils.user_code import load_from_file


def load_extern_object(module_path: str, object_name: str) -> Any:
    """What the file, or the module in `pkg://package.module`, defines as `object_name`. Raises ConfigError."""
    return load_from_file(module_path, object_name, key="load_extern_object")


def load_extern_type(file_path: str, type_name: str) -> Any:
    """The same, under an older name."""
    return load_from_file(file_path, type_name, key="load_extern_type")
