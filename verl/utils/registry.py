"""Names that a configuration may use, and the functions behind them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Generic, TypeVar

from verl.utils.config import ConfigError, did_you_mean

F = TypeVar("F", bound=Callable[..., Any])


class Registry(Generic[F]):
    """Functions by name. `key` is the configuration key that selects one, for messages."""

    def __init__(self, key: str) -> None:
        self._key = key
        self._functions: dict[str, F] = {}

    def register(self, name: str) -> Callable[[F], F]:
        """Decorator. Raises ValueError if another function has the name; the same one may register again (reload)."""

        def decorate(function: F) -> F:
            taken = self._functions.get(name)
            if taken is not None and _origin(taken) != _origin(function):
                raise ValueError(f"{self._key}={name} is already registered by {_origin(taken)}")
            self._functions[name] = function
            return function

        return decorate

    def get(self, name: str) -> F:
        """Raises ConfigError, with the nearest known name, for a name that nobody registered."""
        if name not in self._functions:
            raise ConfigError(f"{self._key}={name!r} is not registered.{did_you_mean(name, self._functions)}")
        return self._functions[name]

    def names(self) -> list[str]:
        return sorted(self._functions)


def _origin(function: Callable[..., Any]) -> str:
    return f"{function.__module__}.{function.__qualname__}"
