"""Names that a configuration may use, and the functions behind them."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any, Generic, TypeVar

from verl.utils.config import ConfigError, did_you_mean

F = TypeVar("F", bound=Callable[..., Any])


class Registry(Generic[F]):
    """Functions by name. `key` is the configuration key that selects one, for messages.

    All are called with the same `arguments`, by keyword.
    """

    def __init__(self, key: str, arguments: Sequence[str] = ()) -> None:
        self._key = key
        self._arguments = tuple(arguments)
        self.functions: dict[str, F] = {}
        """By name; `register` adds to it."""

    def register(self, name: str) -> Callable[[F], F]:
        """Decorator. Raises ValueError if another function has the name; the same one may register again (reload)."""

        def decorate(function: F) -> F:
            taken = self.functions.get(name)
            if taken is not None and _origin(taken) != _origin(function):
                raise ValueError(f"{self._key}={name} is already registered by {_origin(taken)}")
            self.functions[name] = function
            return function

        return decorate

    def get(self, name: str) -> F:
        """Raises ConfigError for a name that nobody registered, with the nearest one, and for another signature."""
        if name not in self.functions:
            raise ConfigError(f"{self._key}={name!r} is not registered.{did_you_mean(name, self.functions)}")
        if self._arguments:
            require_keywords(self.functions[name], self._arguments, f"{self._key}={name}")
        return self.functions[name]

    def names(self) -> list[str]:
        return sorted(self.functions)


def require_keywords(function: Callable[..., Any], arguments: Sequence[str], what: str) -> None:
    """Raises ConfigError unless `function`, which `what` names, can be called with `arguments` by keyword."""
    signature = inspect.signature(function)
    try:
        signature.bind(**dict.fromkeys(arguments))
    except TypeError as exc:
        raise ConfigError(
            f"{what}: {_origin(function)}{signature} cannot take ({', '.join(arguments)}) by name: {exc}"
        ) from exc


def _origin(function: Callable[..., Any]) -> str:
    return f"{function.__module__}.{function.__qualname__}"
