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

    All are called with the same `arguments`, by keyword, if they are given. What is registered has the methods of
    `interface`, a "module:Class". `missing` is raised for a built-in one that cannot be imported; `hint` ends the
    message about an unknown name.
    """

    def __init__(
        self,
        key: str,
        arguments: Sequence[str] = (),
        *,
        builtin: Mapping[str, Builtin] | None = None,
        interface: str = "",
        missing: type[Exception] = ConfigError,
        hint: str = "",
    ) -> None:
        self._key = key
        self._arguments = tuple(arguments)
        self._interface = interface
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
        """Raises ConfigError for a name that nobody registered, with the nearest one, and for what is registered with
        another signature. Imports nothing that is built in."""
        if name not in self.builtin and name not in self.functions:
            known = choose_from(name, self.names())
            raise ConfigError(f"{self._key}={name!r} is not registered.{known}{self._hint}")
        if name in self.functions:
            found, what = self.functions[name], f"{self._key}={name}"
            if self._arguments:
                require_keywords(found, self._arguments, what)
            if self._interface and inspect.isclass(found):
                require_interface(found, imported(self._interface), what)

    def get(self, name: str) -> T:
        """Raises as `require`, and `missing` for what a built-in one lacks here."""
        self.require(name)
        return self.functions[name] if name in self.functions else self._imported(name, self.builtin[name])

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


def require_interface(found: type, interface: type, what: str) -> None:
    """Raises ConfigError unless the class `found`, which `what` names, has every method of `interface`, and each can be
    called as that of `interface`, or of a class between the two.

    What a method says that it returns, as a class in its module, is looked at in the same way.
    """
    bases = [base for base in found.__mro__[1:] if base.__module__.partition(".")[0] == __name__.partition(".")[0]]
    for declared in dict.fromkeys([interface, *interface.__mro__, *bases]):
        for name, wanted in vars(declared).items():
            is_method = inspect.isfunction(wanted) or isinstance(wanted, classmethod | staticmethod)
            if is_method and not name.startswith("_"):
                _require_method(found, declared, name, what)


def _require_method(found: type, declared: type, name: str, what: str) -> None:
    own, wanted = getattr(found, name, None), getattr(declared, name)
    where = f"{declared.__name__}.{name}"
    is_same = own is not None and _function(own) is _function(wanted)
    only_said = is_same and getattr(declared, "_is_protocol", False)  # of a class that names the protocol as its base
    if own is None or only_said or getattr(own, "__isabstractmethod__", False):
        raise ConfigError(f"{what}: {_origin(found)} lacks the method {where}{inspect.signature(wanted)}")
    if is_same or not callable(own):
        return
    given, keywords = _call(declared, name)
    bound = _is_bound(found, name)
    signature, as_declared = inspect.signature(own), f"{where}{inspect.signature(wanted)}"
    try:
        signature.bind(*given[bound:], **dict.fromkeys(keywords))
    except TypeError as exc:
        raise ConfigError(
            f"{what}: {_origin(_function(own))}{signature} cannot be called as {as_declared}: {exc}"
        ) from exc
    returned, expected = (_named(each, inspect.signature(each).return_annotation) for each in (own, wanted))
    if returned is not None and expected is not None and returned is not expected:
        require_interface(returned, expected, f"{what}: {name}()")


def _call(declared: type, name: str) -> tuple[list[str], list[str]]:
    """What a caller gives by place, `self` first, and by name, of all that it may give."""
    parameters = list(inspect.signature(getattr(declared, name)).parameters.values())
    kinds = inspect.Parameter
    given = ["self"] if _is_bound(declared, name) else []
    given += [one.name for one in parameters if one.kind is kinds.POSITIONAL_ONLY]
    by_place = [one for one in parameters if one.kind is kinds.POSITIONAL_OR_KEYWORD]
    given += [one.name for one in by_place if one.default is one.empty]
    named = [one.name for one in by_place if one.default is not one.empty]
    return given, named + [one.name for one in parameters if one.kind in (kinds.KEYWORD_ONLY, kinds.VAR_KEYWORD)]


def _is_bound(owner: type, name: str) -> bool:
    """Whether `getattr` of the class gives what needs no first argument more."""
    return isinstance(inspect.getattr_static(owner, name), classmethod | staticmethod)


def _function(method: Any) -> Any:
    return getattr(method, "__func__", method)


def _named(function: Any, annotation: Any) -> type | None:
    """The class that an annotation names, if its module has it under that name."""
    found = _function(function).__globals__.get(annotation) if isinstance(annotation, str) else annotation
    return found if inspect.isclass(found) and found.__module__ != "builtins" else None


def _origin(function: Callable[..., Any]) -> str:
    return f"{function.__module__}.{function.__qualname__}"
