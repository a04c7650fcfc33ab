"""Translates the keys and values of a launch of verl into this project's, by the table in `keys`.

No key is ignored silently: a translation that loses anything adds a `Note`, an untranslated key is a problem.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from verl.trainer.config.from_verl.keys import RULES
from verl.trainer.config.from_verl.rules import (
    Moved,
    NoEffect,
    Rule,
    as_only_teacher,
    find_rule,
    is_verls,
    is_verls_default,
    known_to_verl,
)
from verl.trainer.config.from_verl.spellings import REASONS, SPELLINGS
from verl.trainer.config.schema import free_form_key, is_known, keys
from verl.utils.builtin import PREFIX, SEEING_MODEL, SHAPES, is_builtin
from verl.utils.config import ConfigError, written
from verl.utils.language_model import SEEING, WITH_VIDEOS, directory_sees

CHECKPOINT_ENGINE, MODEL = "actor_rollout_ref.rollout.checkpoint_engine", "actor_rollout_ref.model.path"
LANGUAGE_MODEL_ONLY = "actor_rollout_ref.model.language_model_only"
PICTURES, VIDEOS, SOUNDS = "data.image_key", "data.video_key", "data.audio_key"
"""Columns that no model, or only some, reads here. verl's files always name them, so only a key set by the user
counts. A row with something in such a column is refused."""


@dataclass(frozen=True, kw_only=True)
class Note:
    """An accepted key that lacks its effect in verl."""

    key: str
    value: Any
    why: str
    costs: bool = False
    """The run needs more memory or time than in verl; its results are the same."""

    def __str__(self) -> str:
        return f"{self.key}={written(self.value)}: {self.why}"


@dataclass(frozen=True, kw_only=True)
class Translation:
    values: dict[str, Any]
    notes: list[Note]
    problems: list[str]
    """Lines about verl's keys that cannot be translated."""
    unknown: list[str]
    """Keys that neither verl nor this project has."""
    refused: dict[str, list[str]] = field(default_factory=dict)
    """verl's keys that are refused, by the reason; `problems` has a line for each reason."""
    pictures: bool = False
    """Whether a column of pictures is named, and the built-in model, which reads text, stands in for one that sees."""


def rule_of(dotted: str) -> Rule | None:
    return find_rule(RULES, dotted)


def translated(values: Mapping[str, Any], explicit: Collection[str] = ()) -> Translation:
    """`values` translated to keys of this project. `explicit` are the keys that the command line sets."""
    result = Translation(values=_copy(values), notes=[], problems=[], unknown=[])
    foreign = dict(_foreign(values))
    for key in foreign:
        _drop(result.values, key)

    def at(dotted: str) -> Any:
        return foreign[dotted] if dotted in foreign else _get(result.values, dotted)

    for key, value in foreign.items():
        try:
            _apply(key, value, result, at, explicit)
        except ConfigError as exc:
            result.problems.append(f"{key}={written(value)}: {exc}")
    for key, convert in SPELLINGS.items():
        if not _has(result.values, key):
            continue
        value = _get(result.values, key)
        try:
            ours = convert(value, at)
        except ConfigError as exc:
            result.problems.append(f"{key}={written(value)}: {exc}")
            continue
        if ours is not value and ours != value:
            _put(result.values, key, ours)
            result.notes.append(Note(key=key, value=value, why=REASONS.get(key) or f"it is {written(ours)} here"))
    for key, whole in ((VIDEOS, WITH_VIDEOS), (SOUNDS, ())):
        if key in explicit and (value := _get(result.values, key)) and not _sees(result.values, whole):
            readers = f" unless the model is one of {', '.join(whole)}" if whole else ""
            why = f"a row in which it is not empty is refused{readers}"
            result.notes.append(Note(key=key, value=value, why=why))
    pictures = PICTURES in explicit and _of_stand_in(result)
    problems = [*result.problems, *(_refusal(keys, why) for why, keys in result.refused.items())]
    return replace(result, values=_without_empty(result.values), problems=problems, pictures=pictures)


def _of_stand_in(result: Translation) -> bool:
    """Whether the column of pictures, which the launch names, is not for the built-in model, which reads text. One of
    the user's own that reads text is a problem."""
    value, path = _get(result.values, PICTURES), _get(result.values, MODEL)
    if not value or _sees(result.values):
        return False
    if is_builtin(str(path or PREFIX)):
        why = f"{path or 'the built-in model'} reads text alone: a row in which it is not empty is refused"
        result.notes.append(Note(key=PICTURES, value=value, why=why))
        return True
    result.problems.append(
        f"{PICTURES}={written(value)}: the model reads text alone: give one that sees ({', '.join(SEEING)}; of those "
        f"with a language model of their own, {LANGUAGE_MODEL_ONLY}=false), or leave it out to train on texts"
    )
    return False


def _sees(values: Mapping[str, Any], kinds: Sequence[str] = SEEING) -> bool:
    """Whether the policy that is named sees, and is of `kinds`; the built-in one for `builtin:shapes` is Qwen2.5-VL."""
    path = _get(values, MODEL)
    if path is None:
        return bool(kinds) and _get(values, "data.train_files") in (SHAPES, [SHAPES])
    whole = _get(values, LANGUAGE_MODEL_ONLY) is False
    return (path == SEEING_MODEL and bool(kinds)) or directory_sees(str(path), kinds, whole=whole)


def _refusal(refused: list[str], why: str) -> str:
    """One line, however many keys of an engine that is not here a script sets."""
    more = f" (and {len(refused) - 1} more)" if len(refused) > 1 else ""
    return f"verl key {refused[0]!r}{more} is not supported here: {why}"


def _apply(key: str, value: Any, result: Translation, at: Any, explicit: Collection[str]) -> None:
    rule = rule_of(key)
    if isinstance(rule, Moved):
        _move(key, value, rule, result, at, explicit)
        return
    _judge(key, value, rule, result, at)


def _move(key: str, value: Any, rule: Moved, result: Translation, at: Any, explicit: Collection[str]) -> None:
    ours = rule.convert(value, at) if rule.convert else value
    if rule.why:
        result.notes.append(Note(key=key, value=value, why=rule.why))
    if ours is None and value is not None:
        return
    for target in rule.to:
        if target in explicit and _get(result.values, target) != ours and rule.convert is None:
            result.problems.append(
                f"{key}={written(value)} and {target}={written(_get(result.values, target))} are the same key "
                "with different values: set one of them"
            )
            continue
        if ours is not None or rule.convert is None:
            _put(result.values, target, ours)


def _judge(key: str, value: Any, rule: Rule | None, result: Translation, at: Any) -> None:
    """A key that has no equal here, or none that is known."""
    if isinstance(rule, NoEffect) and (rule.only is None or rule.only(value, at)):
        costs = rule.costs is not None and rule.costs(value, at)
        result.notes.append(Note(key=key, value=value, why=rule.why, costs=costs))
    elif is_verls_default(key, value) and not _of_another_mode(key, value, rule):
        why = (isinstance(rule, NoEffect) and rule.default) or "verl's default, as if it were not there"
        result.notes.append(Note(key=key, value=value, why=why))
    elif isinstance(rule, NoEffect):
        result.problems.append(f"verl key {key!r} is not supported here with {written(value)}: {rule.otherwise}")
    elif rule is not None:
        result.refused.setdefault(rule.why, []).append(key)
    elif is_verls(key):
        result.problems.append(f"verl key {key!r} is not supported here, other than with verl's default")
    else:
        result.unknown.append(key)


def _of_another_mode(key: str, value: Any, rule: Rule | None) -> bool:
    """Whether it is a default of verl's other configuration files alone, and a rule says which values go here."""
    return isinstance(rule, NoEffect) and value != known_to_verl()[as_only_teacher(key)][0]


def _foreign(values: Mapping[str, Any], path: str = "") -> Iterator[tuple[str, Any]]:
    """Every leaf that is no key here, and every one with a rule; of a section that nobody knows, the section."""
    for name, value in values.items():
        dotted = f"{path}.{name}" if path else str(name)
        if dotted == CHECKPOINT_ENGINE:
            continue
        if dotted in RULES and dotted not in keys():
            yield dotted, value
        elif free_form_key(dotted) is not None:
            if rule_of(dotted) is not None and dotted not in keys():
                yield dotted, value
            elif isinstance(value, Mapping):
                yield from _foreign(value, dotted)
        elif isinstance(value, Mapping) and value and (is_known(dotted) or is_verls(dotted) or _has_rules(dotted)):
            yield from _foreign(value, dotted)
        elif not is_known(dotted):
            yield dotted, value


def _has_rules(section: str) -> bool:
    return rule_of(section) is not None or any(key.startswith(f"{section}.") for key in RULES)


def _without_empty(values: dict[str, Any], path: str = "") -> dict[str, Any]:
    """Without sections that are no sections here, and from which everything was taken."""
    kept: dict[str, Any] = {}
    for name, value in values.items():
        dotted = f"{path}.{name}" if path else str(name)
        inner = _without_empty(value, dotted) if isinstance(value, dict) else value
        if inner != {} or is_known(dotted):
            kept[name] = inner
    return kept


def _get(values: Mapping[str, Any], dotted: str) -> Any:
    found: Any = values
    for name in dotted.split("."):
        if not isinstance(found, Mapping):
            return None
        found = found.get(name)
    return found


def _has(values: Mapping[str, Any], dotted: str) -> bool:
    section, _, last = dotted.rpartition(".")
    found = _get(values, section)
    return isinstance(found, Mapping) and last in found


def _put(values: dict[str, Any], dotted: str, value: Any) -> None:
    *path, last = dotted.split(".")
    for name in path:
        values = values.setdefault(name, {})
    values[last] = value


def _drop(values: dict[str, Any], dotted: str) -> None:
    name, _, below = dotted.partition(".")
    if not below:
        values.pop(name, None)
        return
    if isinstance(inner := values.get(name), dict):
        _drop(inner, below)


def _copy(values: Any) -> Any:
    return {key: _copy(value) for key, value in values.items()} if isinstance(values, Mapping) else values
