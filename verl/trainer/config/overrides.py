"""Checks overrides on the command line against the schema and converts them to a form that Hydra accepts."""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException

from verl.trainer.config.schema import section_paths
from verl.trainer.config.suggest import key_error
from verl.utils.config import ConfigError

PLAIN = re.compile(r"[\w./:@-]+", re.ASCII)


def parse(overrides: Sequence[str]) -> list[Override]:
    """Parse overrides. Raises ConfigError with a line, and the usual reason, for each that Hydra cannot parse."""
    parser = OverridesParser.create()
    parsed: list[Override] = []
    problems: list[str] = []
    for text in overrides:
        if not text.strip():
            problems.append(
                f"{text!r} is no key=value: a backslash with a blank behind it ends the command of a script"
            )
            continue
        if text.startswith("=") or ("=" not in text and not text.startswith("~")):
            problems.append(f"malformed override {text!r}: write key=value")
            continue
        try:
            parsed.extend(parser.parse_overrides([_quoted(text)]))
        except HydraException as exc:
            problems.append(f"malformed override {text!r}: {str(exc).splitlines()[0]}; {_remedy(text)}")
    if problems:
        raise ConfigError("\n".join(problems))
    return parsed


def _quoted(text: str) -> str:
    """With quotes around a value that can only be a string but has characters that Hydra's grammar does not know:
    `~`, and letters beyond ASCII."""
    key, _, value = text.partition("=")
    return f'{key}="{value}"' if re.fullmatch(r"[\w./:@~-]+", value) and not PLAIN.fullmatch(value) else text


def _remedy(text: str) -> str:
    key, _, value = text.partition("=")
    if value.startswith("{"):
        return f"a mapping is written '{key}={{a: 1, b: [2, 3], c: \"two words\"}}', its keys without quotes"
    return f"a value with special characters takes two pairs of quotes: '{key}=\"{value}\"'"


def normalize(overrides: Sequence[str], groups: Collection[str], problems: list[str]) -> list[str]:
    """The overrides with every key checked. Omits a key that cannot be set, with a line in `problems`.

    Setting a key becomes Hydra's `++key=value`, which sets it whether or not the composed YAML already holds it: keys
    of free-form sections are always new, and a user's YAML file need not list every key. The schema has already
    confirmed that the key exists. Choices of config groups (`rollout=...`) and Hydra's own keys pass unchanged.
    """
    result: list[str] = []
    for override in parse(overrides):
        text = override.input_line or ""
        key = override.key_or_group
        if override.is_sweep_override():
            problems.append(
                f"{text!r} has several values; one run takes one (a list is written {key}=[a,b], a comma in a string "
                f"'{key}=\"a,b\"')"
            )
            continue
        if key.endswith("_threshold") and re.search(r"\d_\d", text) and isinstance(override.value(), (int, float)):
            problems.append(f"{text!r} is read as the number {override.value()}; two bounds are written like 0.5_2.0")
            continue
        if _is_group_choice(override, groups) or override.is_hydra_override():
            result.append(text)
            continue
        if message := key_error(key):
            added = text.startswith("+") and message.startswith("unknown configuration key")
            problems.append(message + (" A leading + adds no new keys." if added else ""))
            continue
        if key in groups and key in section_paths() and not override.is_delete() and not _is_mapping(override):
            problems.append(f"{key} is a section of keys; it cannot be set to {text.partition('=')[2]}")
            continue
        result.append(text if override.is_delete() else "++" + text.lstrip("+"))
    return result


def set_keys(overrides: Sequence[str]) -> set[str]:
    """The full dotted keys that the command line sets."""
    return {override.key_or_group for override in parse(overrides) if not override.is_delete()}


def _is_group_choice(override: Override, groups: Collection[str]) -> bool:
    """Whether it selects a file of a config group: `data=my_data`, `rollout@actor_rollout_ref.rollout=mine`."""
    if override.package is not None:
        return True
    value = override.value()
    files = value if isinstance(value, list) else [value]
    return override.key_or_group in groups and bool(files) and all(isinstance(file, str) for file in files)


def _is_mapping(override: Override) -> bool:
    return isinstance(override.value(), dict)
