"""Registries: names in a configuration, and the functions or classes that they select."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import FunctionType
from typing import Any, Generic, TypeVar

from .config import ConfigError, choose_from

T = TypeVar("T", bound=Callable[..., Any])


@dataclass(frozen=True, kw_only=True)
class Builtin:
    """A built-in entry, imported on first use."""

    target: str
    """"module:name"."""
    remedy: str = ""
    """The command that installs what it needs."""
    package: str | None = None
    """A package that it needs, if importing `target` does not import it."""


class Registry(Generic[T]):
    """Functions or classes by name. `key` is the configuration key that selects one, for messages.

    With `arguments`, every entry must accept these keyword arguments. `missing` is the error for a built-in entry that
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
        """Decorator. Raises ConfigError if another function has the name; the same one may register again (reload)."""

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
        """Raises ConfigError for an unknown name, with the nearest known one. Imports nothing."""
        if name not in self.builtin and name not in self.functions:
            known = choose_from(name, self.names())
            raise ConfigError(f"{self._key}={name!r} is not registered.{known}{self._hint}")

    def get(self, name: str) -> T:
        """The entry of `name`. Raises ConfigError for an unknown name or a wrong signature, `missing` if a built-in
        entry cannot be imported."""
        self.require(name)
        found = self.functions[name] if name in self.functions else self._imported(name, self.builtin[name])
        if self._arguments:
            require_keywords(found, self._arguments, f"{self._key}={name}")
        return found

    def require_present(self, name: str) -> None:
        """As `get`, but a built-in entry is not imported: its package must be there."""
        if name in self.functions or name not in self.builtin:
            self.get(name)
            return
        builtin = self.builtin[name]
        if builtin.package is not None and importlib.util.find_spec(builtin.package) is None:
            raise self._missing(f"{self._key}={name} needs the package {builtin.package!r}: {builtin.remedy}")

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
    """Import the object named by "module:name"."""
    module, _, name = target.partition(":")
    return getattr(importlib.import_module(module), name)


def require_keywords(function: Callable[..., Any], arguments: Sequence[str], what: str) -> None:
    """Raises ConfigError, naming `what`, unless `function` accepts the keyword `arguments`."""
    signature = inspect.signature(function)
    try:
        signature.bind(**dict.fromkeys(arguments))
    except TypeError as exc:
        raise ConfigError(
            f"{what}: {_origin(function)}{signature} cannot take ({', '.join(arguments)}) by name: {exc}"
        ) from exc


def require_methods(found: type, protocol: type, what: str, optional: Sequence[str] = ()) -> None:
    """Raises ConfigError, naming `what`, unless the class `found` has the public methods of `protocol`, but for
    `optional` ones.

    Each must accept its arguments: those that are optional or keyword-only by name, the others by place."""
    for name, method in vars(protocol).items():
        if name.startswith("_") or not isinstance(method, (FunctionType, classmethod, staticmethod)):
            continue
        expected, own = inspect.signature(getattr(protocol, name)), getattr(found, name, None)
        if own is None and name in optional:
            continue
        if not callable(own):
            raise ConfigError(f"{what}: {_origin(found)} has no method {name}{expected}")
        by_name = [each.name for each in expected.parameters.values() if _is_named(each)]
        signature = inspect.signature(own)
        try:
            signature.bind(*[None] * (len(expected.parameters) - len(by_name)), **dict.fromkeys(by_name))
        except TypeError as exc:
            raise ConfigError(
                f"{what}: {_origin(found)}.{name}{signature}: {exc}. {protocol.__name__} has {name}{expected}"
            ) from exc


def require_subclass(found: Any, base: type, what: str, attributes: Sequence[str] = ()) -> None:
    """Raises ConfigError, naming `what`, unless `found` is a subclass of the abstract class `base`, with its abstract
    methods and `attributes`, whose methods accept the arguments of those of `base`."""
    if not (isinstance(found, type) and issubclass(found, base)):
        raise ConfigError(f"{what}: {_origin(found)} is no subclass of {_origin(base)}")
    abstract: frozenset[str] = getattr(found, "__abstractmethods__", frozenset())
    if lacking := [*sorted(abstract), *(name for name in attributes if not hasattr(found, name))]:
        raise ConfigError(f"{what}: {_origin(found)} lacks {', '.join(lacking)} of {_origin(base)}")
    require_methods(found, base, what)


def _is_named(parameter: inspect.Parameter) -> bool:
    return parameter.kind is parameter.KEYWORD_ONLY or parameter.default is not parameter.empty


def _origin(function: Callable[..., Any]) -> str:
    return f"{function.__module__}.{function.__qualname__}"
