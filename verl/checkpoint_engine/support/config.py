"""Strict conversion of plain mappings into configuration dataclasses.

Every configuration class of the project is a frozen, keyword-only dataclass whose fields carry a one-line description
(`option(default, "what it does")`). This module converts the user's values to such a class, or raises one error with
the full dotted key and the cause of each problem.
"""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import math
import types
import typing
from collections.abc import Iterable, Mapping
from functools import cache
from typing import Any, TypeVar

T = TypeVar("T")


class ConfigError(ValueError):
    """The user's configuration is invalid. The message names the key, the value and the remedy."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Bounds:
    """The range of a field's numbers, which must be finite."""

    least: float | None = None
    above: float | None = None
    most: float | None = None
    below: float | None = None

    def __contains__(self, number: float) -> bool:
        return (
            math.isfinite(number)
            and (self.least is None or number >= self.least)
            and (self.above is None or number > self.above)
            and (self.most is None or number <= self.most)
            and (self.below is None or number < self.below)
        )

    def __str__(self) -> str:
        """The range in words, `at least 0 and at most 1`; empty without a bound."""
        words = {"least": "at least", "above": "above", "most": "at most", "below": "below"}
        limits = dataclasses.asdict(self)
        return " and ".join(f"{word} {limits[name]}" for name, word in words.items() if limits[name] is not None)


class Section:
    """A section of the configuration. User code may read it as verl's: `config.get("gamma")`, `config["gamma"]`."""

    def get(self, key: str, default: Any = None) -> Any:
        return getattr(self, key, default)

    def __getitem__(self, key: str) -> Any:
        try:
            return getattr(self, key)
        except AttributeError as exc:
            raise KeyError(key) from exc

    def __contains__(self, key: object) -> bool:
        return isinstance(key, str) and hasattr(self, key)


def option(default: Any, help: str, *, choices: tuple[Any, ...] = (), follows: bool = False, **bounds: float) -> Any:
    """A dataclass field with a default, a description for the generated reference, and its permitted values.

    `bounds`: those of `Bounds`, in a list for each number. A field that `follows` other options is null in YAML; its
    value then comes from them, and is `default` if they have their defaults.
    """
    metadata = {"help": help, "choices": choices, "bounds": Bounds(**bounds), "follows": follows}
    if isinstance(default, (list, dict)):
        return dataclasses.field(default_factory=lambda: type(default)(default), metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


def section(cls: type[Any], help: str = "") -> Any:
    """A dataclass field that holds a nested section with that section's own defaults."""
    return dataclasses.field(default_factory=cls, metadata={"help": help})


LISTED = 40
"""An error lists at most this many known names; of more it names the nearest three."""


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """`" Did you mean 'x'?"`. Without a close name it lists all known ones, or of many the nearest three."""
    known = sorted(known)
    close = difflib.get_close_matches(word, known, n=1, cutoff=0.6)
    if close:
        return f" Did you mean {close[0]!r}?"
    if len(known) > LISTED:
        return f" The nearest of {len(known)}: {', '.join(difflib.get_close_matches(word, known, n=3, cutoff=0))}."
    return f" Known: {', '.join(known) or 'none'}."


def choose_from(word: str, known: Iterable[str]) -> str:
    """`" Did you mean 'x'? Known: ..."`, with all names: for options with few names."""
    known = sorted(known)
    near = did_you_mean(word, known)
    return f"{near} Known: {', '.join(known)}." if near.startswith(" Did") else near


@cache
def field_types(cls: type[Any]) -> dict[str, Any]:
    return typing.get_type_hints(cls)


def from_mapping(cls: type[T], values: Mapping[str, Any], path: str = "", problems: list[str] | None = None) -> T:
    """Build `cls` from `values`; `path` is the dotted key of the section, for messages.

    Raises one ConfigError with a line for each problem: an unknown key (with the nearest known one), a value of the
    wrong type or outside `choices` or `Bounds`, an error of the class's `__post_init__`. With `problems` it adds them
    to that list instead, and those keys keep their defaults.
    """
    found: list[str] = [] if problems is None else problems
    arguments: dict[str, Any] = {}
    hints = field_types(typing.cast("Any", cls))
    known = {field.name: field for field in dataclasses.fields(cls)}  # type: ignore[arg-type]
    prefix = f"{path}." if path else ""
    for key, value in values.items():
        if key not in known:
            found.append(f"unknown configuration key {prefix + str(key)!r}.{did_you_mean(str(key), known)}")
            continue
        try:
            arguments[key] = _checked(hints[key], value, prefix + key, known[key].metadata, found)
        except ConfigError as exc:
            found.append(str(exc))
    try:
        built = cls(**arguments)
    except ConfigError as exc:
        found.append(f"{path}: {exc}" if path else str(exc))
        built = cls()
    if problems is None and found:
        raise ConfigError("\n".join(found))
    return built


def _checked(hint: Any, value: Any, dotted: str, metadata: Mapping[str, Any], problems: list[str]) -> Any:
    if dataclasses.is_dataclass(hint) and isinstance(value, Mapping):
        return from_mapping(typing.cast("type[Any]", hint), value, dotted, problems)
    choices = metadata.get("choices") or ()
    if value is False and "off" in choices:
        value = "off"  # which YAML reads as false where it has no quotes
    converted = _convert(hint, value, dotted)
    _require_bounds(converted, metadata.get("bounds"), dotted)
    if choices and converted not in choices:
        raise ConfigError(_not_a_choice(dotted, value, choices, metadata["help"]))
    return converted


def _not_a_choice(dotted: str, value: Any, choices: tuple[Any, ...], help_text: str) -> str:
    words = [written(choice) for choice in choices]
    if len(words) == 1:
        return f"{dotted}={written(value)} is not possible, only {words[0]}: {help_text}"
    shown = repr(value) if isinstance(value, str) else written(value)
    near = difflib.get_close_matches(str(value), words, n=1, cutoff=0.6)
    return f"{dotted}={shown} is not one of: {', '.join(words)}." + (f" Did you mean {near[0]!r}?" if near else "")


def written(value: Any) -> str:
    """The value as text for YAML and the command line."""
    if value is None:
        return "null"
    return str(value).lower() if isinstance(value, bool) else str(value)


def _require_bounds(value: Any, bounds: Bounds | None, dotted: str) -> None:
    if isinstance(value, (list, tuple)):
        for index, item in enumerate(value):
            _require_bounds(item, bounds, f"{dotted}[{index}]")
    elif bounds is not None and isinstance(value, (int, float)) and value not in bounds:
        raise ConfigError(f"{dotted} must be {bounds if math.isfinite(value) else 'finite'}, not {value}")


def to_mapping(config: Any) -> dict[str, Any]:
    """The inverse of `from_mapping`: plain dicts, lists and scalars."""
    return dataclasses.asdict(config)


def _convert(hint: Any, value: Any, dotted: str) -> Any:
    origin = typing.get_origin(hint)
    if origin in (typing.Union, types.UnionType):
        return _convert_union(typing.get_args(hint), value, dotted)
    if dataclasses.is_dataclass(hint):
        if not isinstance(value, Mapping):
            raise ConfigError(f"{dotted} is a section of keys; it cannot be set to {written(value)}")
        return from_mapping(typing.cast("type[Any]", hint), value, dotted)
    if hint is Any:
        return value
    if origin in (list, tuple):
        return _convert_sequence(hint, value, dotted)
    if origin is dict or hint is dict:
        if not isinstance(value, Mapping):
            raise ConfigError(f"{dotted} takes a mapping, not {value!r}")
        return dict(value)
    return _convert_scalar(hint, value, dotted)


def _convert_scalar(hint: Any, value: Any, dotted: str) -> Any:
    is_number = isinstance(value, (int, float, str)) and not isinstance(value, bool)
    if hint is float and is_number:  # YAML reads 1e-6 as a string
        with contextlib.suppress(ValueError):
            return float(value)
    elif isinstance(value, hint) and not (hint is int and isinstance(value, bool)):
        return value
    raise ConfigError(f"{dotted} takes {_name(hint)}, not {value!r}")


def _convert_union(members: tuple[Any, ...], value: Any, dotted: str) -> Any:
    if type(None) in members:
        if value is None:
            return None
        if value == "None":
            raise ConfigError(f"{dotted}=None: None is a word here; write null")
    errors = []
    for member in members:
        if member is type(None):
            continue
        try:
            return _convert(member, value, dotted)
        except ConfigError as exc:
            errors.append(exc)
    if len(errors) == 1:
        raise errors[0]
    raise ConfigError(f"{dotted} takes {' or '.join(_name(member) for member in members)}, not {value!r}")


def _convert_sequence(hint: Any, value: Any, dotted: str) -> Any:
    if isinstance(value, (str, int, float)):
        value = [value]  # as it stands on the command line: trainer.logger=console
    if not isinstance(value, (list, tuple)):
        raise ConfigError(f"{dotted} takes a list, not {written(value)}")
    item = (typing.get_args(hint) or (Any,))[0]
    items = [_convert(item, element, f"{dotted}[{index}]") for index, element in enumerate(value)]
    return typing.get_origin(hint)(items)


def _name(hint: Any) -> str:
    names = {int: "an integer", float: "a number", str: "a string", bool: "true or false", type(None): "null"}
    return names.get(hint, str(hint))
