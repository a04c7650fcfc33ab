"""What becomes of a key that verl has and this project has not, or has elsewhere: three kinds of rules.

The rules themselves are data, in `keys`. They are only consulted for keys that are unknown here.
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
    """What the run has under a full dotted key, ours or verl's; None where it has nothing."""

    def __call__(self, dotted: str) -> Any: ...


@dataclass(frozen=True, kw_only=True)
class Moved:
    """It is here under another name, or in another place, or in other units: each of `to` gets its value."""

    to: tuple[str, ...]
    convert: Callable[[Any, Values], Any] | None = None
    """From verl's value to ours, None: what is there stays. Raises ConfigError for a value that has no equal here."""
    why: str = ""
    """What is worth saying about it; empty: nothing is lost or changed."""


@dataclass(frozen=True, kw_only=True)
class NoEffect:
    """It is accepted and changes nothing: the run computes what it would compute in verl."""

    why: str
    only: Callable[[Any, Values], bool] | None = None
    """Values for which that is so; None: all of them."""
    otherwise: str = ""
    """What is said of the others, which are refused."""
    costs: Callable[[Any, Values], bool] | None = None
    """Values with which verl would need less memory or time than this run: a warning when it starts."""


@dataclass(frozen=True, kw_only=True)
class Refused:
    """Not here, with what to use instead, or why nothing is needed."""

    why: str


Rule = Moved | NoEffect | Refused


def as_only_teacher(dotted: str) -> str:
    """`dotted` with the name that verl's files give a teacher in the place of any other, which the user chooses."""
    return re.sub(r"^(distillation\.teacher_models)\.[^.]+\.", r"\1.teacher_model.", dotted)


def find_rule(rules: Mapping[str, Rule], dotted: str) -> Rule | None:
    """The most specific one, and for every teacher those of verl's only one.

    A name that ends in `.*` covers the section and everything below it; in a `Moved` of that kind, what the star stands
    for stands at the end of `to`, too.
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
    """Every key of verl 0.9 with its defaults: that of the FSDP configuration, and those of the others behind it."""
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
    """Whether verl does the same without it."""
    return any(_same(value, default) for default in known_to_verl().get(as_only_teacher(dotted), ()))


def _same(value: Any, default: Any) -> bool:
    if isinstance(value, bool) or isinstance(default, bool):
        return value is default
    return bool(value == default)
