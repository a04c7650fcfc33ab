"""The fields of a JSON request, read by name and kind."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, TypeVar

from verl.tenants.refused import Refused

T = TypeVar("T", str, int, float, bool, dict[str, Any])


class Fields:
    """Of one request. What is read is checked; `end` refuses what nobody has read, since it would have no effect."""

    def __init__(self, given: Any, where: str) -> None:
        if not isinstance(given, Mapping):
            raise Refused(f"{where}: an object is asked, not {type(given).__name__}")
        self._given = {name: value for name, value in given.items() if value is not None}
        self._where = where

    def take(self, name: str, kind: type[T], default: T | None = None) -> T:
        """Raises Refused if the field is of another kind, or missing without a default."""
        found = self.maybe(name, kind)
        if found is None:
            if default is None:
                raise Refused(f"{self._where} needs {name}")
            return default
        return found

    def maybe(self, name: str, kind: type[T]) -> T | None:
        value = self._given.pop(name, None)
        if kind is float and isinstance(value, int) and not isinstance(value, bool):
            value = float(value)
        if value is None:
            return None
        if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
            raise Refused(f"{self._where}.{name} is to be of kind {kind.__name__}, not {value!r}")
        if isinstance(value, float) and not math.isfinite(value):
            raise Refused(f"{self._where}.{name} is {value}")
        return value

    def number(self, name: str, kind: type[T], default: T | None, low: float, high: float = math.inf) -> T:
        """A number from `low` to `high`."""
        value = self.take(name, kind, default)
        if not low <= value <= high:  # type: ignore[operator]
            raise Refused(f"{self._where}.{name}={value} is not from {low} to {high}")
        return value

    def seed(self) -> int | None:
        """A seed that torch takes."""
        value = self.maybe("seed", int)
        if value is not None and not 0 <= value < 2**63:
            raise Refused(f"{self._where}.seed={value} is not from 0 to 2**63 - 1")
        return value

    def anything(self, name: str) -> Any:
        return self._given.pop(name, None)

    def without_effect(self, *names: str) -> None:
        """Take fields that do not change what is computed."""
        for name in names:
            self._given.pop(name, None)

    def end(self) -> None:
        """Raises Refused for a field that was not read and asks for something."""
        if asked := {name: value for name, value in self._given.items() if value or isinstance(value, (list, str))}:
            raise Refused(
                f"{self._where}: {', '.join(f'{name}={value!r:.60}' for name, value in asked.items())} is not served"
            )
