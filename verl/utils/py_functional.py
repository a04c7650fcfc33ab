"""verl's import path of small functions on dicts."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager
from typing import Any

from omegaconf import DictConfig, ListConfig


def append_to_dict(data: MutableMapping[str, Any], new_data: Mapping[str, Any], prefix: str = "") -> None:
    """Append each value to the list `data[prefix + name]`, creating it if missing; a list extends it."""
    for name, value in new_data.items():
        found = data.setdefault(f"{prefix}{name}", [])
        found.extend(value) if isinstance(value, list) else found.append(value)


def union_two_dict(dict1: dict[str, Any], dict2: Mapping[str, Any]) -> dict[str, Any]:
    """`dict1` with the further keys of `dict2`. Raises AssertionError for a key with different values."""
    for name, value in dict2.items():
        if name in dict1 and dict1[name] != value:
            raise AssertionError(f"{name} is {dict1[name]!r} in one and {value!r} in the other")
        dict1[name] = value
    return dict1


def rename_dict(data: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """A copy with `prefix` before each key that lacks it."""
    return {name if name.startswith(prefix) else f"{prefix}{name}": value for name, value in data.items()}


def list_of_dict_to_dict_of_list(list_of_dict: Sequence[Mapping[str, Any]]) -> dict[str, list[Any]]:
    """By key, the values of the dicts that have it. Raises AssertionError for a key that the first dict lacks."""
    found: dict[str, list[Any]] = {name: [] for name in (list_of_dict[0] if list_of_dict else {})}
    for one in list_of_dict:
        for name, value in one.items():
            if name not in found:
                raise AssertionError(f"{name!r} is no key of the first dict: {', '.join(found)}")
            found[name].append(value)
    return found


def convert_to_regular_types(obj: Any) -> Any:
    """`obj` with dicts and lists in place of OmegaConf's, at any depth."""
    if isinstance(obj, (dict, DictConfig)):
        return {name: convert_to_regular_types(value) for name, value in obj.items()}
    if isinstance(obj, (list, tuple, ListConfig)):
        return [convert_to_regular_types(value) for value in obj]
    return obj


@contextmanager
def temp_env_var(key: str, value: str) -> Iterator[None]:
    """Set the environment variable during the block, and restore it afterwards."""
    before = os.environ.get(key)
    os.environ[key] = value
    try:
        yield
    finally:
        if before is None:
            os.environ.pop(key, None)
        else:
            os.environ[key] = before
