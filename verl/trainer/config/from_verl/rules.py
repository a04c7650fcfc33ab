"""Three kinds of rules for a key of verl that this project lacks or has elsewhere.

The rules themselves are data, in `keys`. They apply only to keys that are unknown here.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Protocol

ALL_KEYS = Path(__file__).with_name("verl_0_9.tsv")


class Values(Protocol):
    """Returns the run's value of a full dotted key, ours or verl's; None if unset."""

    def __call__(self, dotted: str) -> Any: ...


@dataclass(frozen=True, kw_only=True)
class Moved:
    """The key has another name, place or unit here: each of `to` gets its value."""

    to: tuple[str, ...]
    convert: Callable[[Any, Values], Any] | None = None
    """Converts verl's value to ours; None leaves the present one. Raises ConfigError for a value without an equal."""
    why: str = ""
    """A remark for the user; empty if nothing is lost or changed."""


@dataclass(frozen=True, kw_only=True)
class NoEffect:
    """The key is accepted without effect: the run computes the same as verl."""

    why: str
    only: Callable[[Any, Values], bool] | None = None
    """The values for which this holds; None for all."""
    otherwise: str = ""
    """The error for all other values, which are refused."""
    default: str = ""
    """What is said of verl's default where it is another value."""
    costs: Callable[[Any, Values], bool] | None = None
    """Values with which verl would need less memory or time: the run warns of them at its start."""


@dataclass(frozen=True, kw_only=True)
class Refused:
    """The key is refused; `why` names the alternative, or why none is needed."""

    why: str


Rule = Moved | NoEffect | Refused


def as_only_teacher(dotted: str) -> str:
    """`dotted` with the user's name of a teacher replaced by the one in verl's files."""
    return re.sub(r"^(distillation\.teacher_models)\.[^.]+\.", r"\1.teacher_model.", dotted)


def find_rule(rules: Mapping[str, Rule], dotted: str) -> Rule | None:
    """The most specific rule for a key. All teachers have the rules of verl's only one.

    A name that ends in `.*` covers the section and everything below it; a `Moved` of that kind appends what the star
    stands for to `to`.
    """
    dotted = as_only_teacher(dotted)
    if dotted in rules:
        return rules[dotted]
    parts = dotted.split(".")
    for length in range(len(parts), 0, -1):
        section = ".".join(parts[:length])
        if (rule := rules.get(f"{section}.*")) is not None:
            if isinstance(rule, Moved) and rule.to and rule.to[0].endswith(".*"):
                below = dotted.removeprefix(section)
                return Moved(to=tuple(name.removesuffix(".*") + below for name in rule.to), why=rule.why)
            return rule
    return None


@cache
def known_to_verl() -> Mapping[str, Sequence[Any]]:
    """Every key of verl 0.9 with its defaults: first the FSDP configuration's, then those of the others."""
    lines = ALL_KEYS.read_text(encoding="utf-8").splitlines()
    rows = [line.split("\t") for line in lines if line and not line.startswith("#")]
    return {row[0]: [json.loads(cell) for cell in row[1:]] for row in rows}


@cache
def sections_of_verl() -> frozenset[str]:
    names: set[str] = set()
    for key in known_to_verl():
        parts = key.split(".")
        names.update(".".join(parts[:length]) for length in range(1, len(parts)))
    return frozenset(names)


def is_verls(dotted: str) -> bool:
    """Whether verl 0.9 has a key or a section of that name."""
    dotted = as_only_teacher(dotted)
    return dotted in known_to_verl() or dotted in sections_of_verl()


def is_verls_default(dotted: str, value: Any) -> bool:
    """Whether `value` is a default of verl's key."""
    return any(_same(value, default) for default in known_to_verl().get(as_only_teacher(dotted), ()))


def _same(value: Any, default: Any) -> bool:
    if isinstance(value, bool) or isinstance(default, bool):
        return value is default
    return bool(value == default)
