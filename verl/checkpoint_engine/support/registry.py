"""Names that a configuration may use, and what is behind them."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from .config import ConfigError, choose_from

T = TypeVar("T", bound=Callable[..., Any])


@dataclass(frozen=True, kw_only=True)
class Builtin:
    """What comes with the project, imported when it is asked for."""

    target: str
    """"module:name"."""
    remedy: str = ""
    """How to install what it needs."""
    package: str | None = None
    """What must be importable for it, where importing `target` does not show that."""


class Registry(Generic[T]):
    """Functions or classes by name. `key` is the configuration key that selects one, for messages.

    All are called with the same `arguments`, by keyword, if they are given. `missing` is raised for a built-in one that
    cannot be imported; `hint` ends the message about an unknown name.
    """

    def __init__(
        self,
        key: str,
        arguments: Sequence[str] = (),
        *,
        builtin: Mapping[str, Builtin] | None = None,
        missing: type[Exception] = ConfigError,
        hint: str = "",
    ) -> None:
        self._key = key
        self._arguments = tuple(arguments)
        self._missing = missing
        self._hint = hint
        self.builtin = {} if builtin is None else builtin
        self.functions: dict[str, T] = {}
        """By name; `register` adds to it."""

    def register(self, name: str) -> Callable[[T], T]:
        """Decorator. Raises ConfigError if another one has the name; the same one may register again (reload)."""

        def decorate(function: T) -> T:
            taken = self.builtin[name].target if name in self.builtin else None
            if name in self.functions and _origin(self.functions[name]) != _origin(function):
                taken = _origin(self.functions[name])
            if taken is not None:
                raise ConfigError(f"{self._key}={name!r} is already registered by {taken}")
            self.functions[name] = function
            return function

        return decorate

    def names(self) -> list[str]:
        return sorted({*self.builtin, *self.functions})

    def require(self, name: str) -> None:
        """Raises ConfigError for a name that nobody registered, with the nearest one. Imports nothing."""
        if name not in self.builtin and name not in self.functions:
            known = choose_from(name, self.names())
            raise ConfigError(f"{self._key}={name!r} is not registered.{known}{self._hint}")

    def get(self, name: str) -> T:
        """Raises ConfigError for a name that nobody registered and for another signature, `missing` for what a built-in
        one lacks here."""
        self.require(name)
        found = self.functions[name] if name in self.functions else self._imported(name, self.builtin[name])
        if self._arguments:
            require_keywords(found, self._arguments, f"{self._key}={name}")
        return found

    def new(self, name: str, *arguments: Any, **options: Any) -> Any:
        return self.get(name)(*arguments, **options)

    def _imported(self, name: str, builtin: Builtin) -> T:
        try:
            if builtin.package is not None and importlib.util.find_spec(builtin.package) is None:
                raise ModuleNotFoundError(name=builtin.package)
            found: T = imported(builtin.target)
        except ImportError as exc:
            lacks = f"needs the package {exc.name!r}" if isinstance(exc, ModuleNotFoundError) else f"cannot load: {exc}"
            raise self._missing(f"{self._key}={name} {lacks}: {builtin.remedy}") from exc
        return found


def imported(target: str) -> Any:
    """What "module:name" names."""
    module, _, name = target.partition(":")
    return getattr(importlib.import_module(module), name)


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
