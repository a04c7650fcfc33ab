"""Agent loops by name: built-in, registered in code, or listed in a user's YAML file."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

from verl.checkpoint_engine.support.registry import require_keywords
from verl.experimental.agent_loop.base import AgentLoopBase, DictConfigWrap
from verl.utils.config import ConfigError, did_you_mean
from verl.utils.loading import load_class, read_yaml

LoopClass = TypeVar("LoopClass", bound=type[AgentLoopBase])

CONFIG_KEY = "actor_rollout_ref.rollout.agent.agent_loop_config_path"


@dataclass(frozen=True, slots=True)
class LoopEntry:
    """The origin of a loop. The driver sends it to the workers, which look up the class."""

    target: str | type[AgentLoopBase]
    """"module:Class", "file.py:Class", or the class."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """Further arguments of its constructor."""


BUILTIN: Mapping[str, LoopEntry] = {
    "single_turn_agent": LoopEntry("verl.experimental.agent_loop.single_turn:SingleTurnAgentLoop"),
    "tool_agent": LoopEntry("verl.experimental.agent_loop.tool_loop:ToolAgentLoop"),
    "nemo_gym": LoopEntry("verl.experimental.agent_loop.nemo_gym_agent:NemoGymAgentLoop"),
    "verifiers": LoopEntry("verl.experimental.agent_loop.verifiers_agent:VerifiersAgentLoop"),
}
_registered: dict[str, LoopEntry] = {}


def register(name: str) -> Callable[[LoopClass], LoopClass]:
    """Class decorator: samples with `name` in their column `agent_name` run this loop.

    Takes effect for managers built afterwards in the same process. Raises ConfigError if another class has the name.
    """

    def add(loop_class: LoopClass) -> LoopClass:
        taken = {**BUILTIN, **_registered}.get(name)
        target = f"{loop_class.__module__}:{loop_class.__qualname__}"
        if taken is not None and target not in (taken.target, _target(taken)):
            raise ConfigError(f"an agent loop is already registered as {name!r}")
        if name not in BUILTIN:
            _registered[name] = LoopEntry(loop_class)
        return loop_class

    return add


def known_loops(config_path: str | None = None) -> dict[str, LoopEntry]:
    """Every loop by name; those of the YAML file at `config_path` take precedence. Raises ConfigError.

    The file is a list of entries with `name` and `_target_`; further keys go to the constructor.
    """
    loops = {**BUILTIN, **_registered}
    if config_path is None:
        return loops
    entries = read_yaml(config_path, CONFIG_KEY)
    if not isinstance(entries, list):
        raise ConfigError(f"{CONFIG_KEY}={config_path} holds a list of entries with 'name' and '_target_'")
    for number, entry in enumerate(entries):
        if not isinstance(entry, dict) or not all(isinstance(entry.get(key), str) for key in ("name", "_target_")):
            raise ConfigError(f"{CONFIG_KEY}={config_path}: entry {number} lacks 'name' or '_target_': {entry!r}")
        options = {key: value for key, value in entry.items() if key not in ("name", "_target_")}
        loops[entry["name"]] = LoopEntry(entry["_target_"], options)
    return loops


def loop_factory(name: str, loops: Mapping[str, LoopEntry]) -> Callable[..., AgentLoopBase]:
    """A function that makes a loop of that name from `constructor_arguments`. A name with a colon is a "module:Class".

    Raises ConfigError, also for a loop whose constructor or `run` does not accept its arguments.
    """
    found, options = loop_class(name, loops), _entry(name, loops).options
    require_keywords(found, [*constructor_arguments(None, None, None), *options], f"agent loop {name!r}")
    try:
        inspect.signature(found.run).bind(None, {}, raw_prompt=None, extra_info=None)
    except TypeError as exc:
        raise ConfigError(
            f"agent loop {name!r}: run{inspect.signature(found.run)} cannot take (sampling_params, **columns): {exc}"
        ) from exc
    return partial(found, **options)


def check_loop(name: str, loops: Mapping[str, LoopEntry]) -> type[AgentLoopBase]:
    """The class of a loop that can be made and called. Raises ConfigError as `loop_factory`, and for the options of its
    entry."""
    loop_factory(name, loops)
    found = loop_class(name, loops)
    found.check_options(f"agent loop {name!r}", **_entry(name, loops).options)
    return found


def constructor_arguments(config: Any, servers: Any, tokenizer: Any) -> dict[str, Any]:
    """The arguments of every loop's constructor, with verl's names; `config` is the whole configuration."""
    return {
        "trainer_config": DictConfigWrap(config),
        "server_manager": servers,
        "tokenizer": tokenizer,
        "processor": None,
        "dataset_cls": None,
        "data_config": DictConfigWrap(getattr(config, "data", None)),
    }


def loop_class(name: str, loops: Mapping[str, LoopEntry]) -> type[AgentLoopBase]:
    """The class of the loop with this name. Raises ConfigError."""
    target = _entry(name, loops).target
    return load_class(target, AgentLoopBase, f"agent loop {name!r}") if isinstance(target, str) else target


def _entry(name: str, loops: Mapping[str, LoopEntry]) -> LoopEntry:
    entry = loops.get(name)
    if entry is not None:
        return entry
    if ":" not in name:
        raise ConfigError(f"unknown agent loop {name!r}.{did_you_mean(name, loops)}")
    return LoopEntry(name)


def _target(entry: LoopEntry) -> str:
    target = entry.target
    return target if isinstance(target, str) else f"{target.__module__}:{target.__qualname__}"
