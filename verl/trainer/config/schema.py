"""The configuration dataclasses as a flat list of keys.

One walk over the dataclasses serves the YAML tree, the reference, the help page and the error messages, so none of them
can disagree with what `from_mapping` accepts.
"""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

import yaml

from verl.checkpoint_engine.registry import BUILTIN
from verl.utils.config import field_types
from verl.workers.config import PPOConfig
from verl.workers.config.distillation import TeacherConfig


@dataclass(frozen=True, kw_only=True)
class Key:
    """One configuration key: `path` is the full dotted name, `default` a plain value as YAML would hold it."""

    path: str
    type: str
    default: Any
    choices: tuple[Any, ...]
    bounds: str
    """The condition on a number, like `at least 1`; empty for none."""
    help: str
    free_form: bool
    """The value is a mapping with the user's keys: any key below `path` is accepted."""

    @property
    def name(self) -> str:
        return self.path.rpartition(".")[2]

    @property
    def allowed(self) -> str:
        """The choices or the bounds; empty if every value of the type is allowed."""
        return ", ".join(map(yaml_text, self.choices)) or self.bounds

    @property
    def help_with_allowed(self) -> str:
        return self.help + (f" [{self.allowed}]" if self.allowed else "")


@dataclass(frozen=True, kw_only=True)
class Section:
    """One section and its direct keys; `path` is "" for the root."""

    path: str
    doc: str
    keys: tuple[Key, ...]


def yaml_text(value: object) -> str:
    """`value` as YAML on one line."""
    return yaml.safe_dump(value, default_flow_style=True, width=float("inf")).removesuffix("\n...\n").strip()


@cache
def sections() -> tuple[Section, ...]:
    """Every section, in the order in which the dataclasses declare them; a section precedes its nested ones."""
    return tuple(_walk(PPOConfig(), "", ""))


@cache
def documented_sections() -> tuple[Section, ...]:
    """Every section with keys. After a section with free-form keys come the keys below those: a teacher's, and after
    `checkpoint_engine` its backends' options."""
    found = [section for section in sections() if section.keys]
    place = 1 + max(index for index, section in enumerate(found) if section.path.startswith("distillation"))
    found[place:place] = _walk(TeacherConfig(), "distillation.teacher_models.<name>", "")
    place = 1 + max(index for index, section in enumerate(found) if section.path.startswith("checkpoint_engine"))
    for name, backend in BUILTIN.items():
        if backend.options:
            found[place:place] = _walk(backend.options(), f"checkpoint_engine.engine_kwargs.{name}", "")
            place += 1
    return tuple(found)


@cache
def keys() -> dict[str, Key]:
    """Every key by its full dotted name."""
    return {key.path: key for section in sections() for key in section.keys}


@cache
def section_paths() -> frozenset[str]:
    return frozenset(section.path for section in sections() if section.path)


def free_form_key(dotted: str) -> Key | None:
    """The free-form key that `dotted` is or lies below."""
    parts = dotted.split(".")
    for length in range(1, len(parts) + 1):
        key = keys().get(".".join(parts[:length]))
        if key is not None and key.free_form:
            return key
    return None


def is_known(dotted: str) -> bool:
    """Whether `dotted` names a key, a section, or anything below a free-form key."""
    return dotted in keys() or dotted in section_paths() or free_form_key(dotted) is not None


def _walk(config: Any, path: str, help_text: str) -> Iterator[Section]:
    config_class: Any = type(config)
    hints = field_types(config_class)
    found: list[Key] = []
    nested: list[tuple[Any, str, str]] = []
    for field in dataclasses.fields(config):
        dotted = f"{path}.{field.name}" if path else field.name
        value = getattr(config, field.name)
        if dataclasses.is_dataclass(value):
            nested.append((value, dotted, field.metadata.get("help", "")))
            continue
        found.append(
            Key(
                path=dotted,
                type=str(field.type),
                default=None if field.metadata.get("follows") else list(value) if isinstance(value, tuple) else value,
                choices=tuple(field.metadata.get("choices", ())),
                bounds=str(field.metadata.get("bounds", "")),
                help=field.metadata.get("help", ""),
                free_form=(typing.get_origin(hints[field.name]) or hints[field.name]) is dict,
            )
        )
    doc = (config_class.__doc__ or "").strip().splitlines()[0]
    yield Section(path=path, doc=help_text or doc, keys=tuple(found))
    for value, dotted, text in nested:
        yield from _walk(value, dotted, text)
