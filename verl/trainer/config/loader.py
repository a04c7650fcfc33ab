"""Builds a `PPOConfig` from YAML files and `key=value` overrides, or raises one ConfigError with all problems.

Hydra's compose API composes it; this writes no files, changes no directory and configures no logging.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import yaml
from hydra import compose, initialize_config_dir
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from verl.checkpoint_engine.registry import backend_of_device
from verl.trainer.config.as_shells import take_none, with_homes
from verl.trainer.config.followers import FOLLOWING_ACTOR, with_followers
from verl.trainer.config.from_verl.translation import Note, translated
from verl.trainer.config.overrides import normalize, parse, set_keys
from verl.trainer.config.schema import keys
from verl.trainer.config.suggest import ALIAS, CANONICAL, key_error
from verl.utils.config import ConfigError, did_you_mean, from_mapping
from verl.workers.config import PPOConfig

CONFIG_DIR = Path(__file__).resolve().parent
DEFAULT_NAME = "ppo_trainer"


@dataclass(frozen=True, kw_only=True)
class Resolved:
    """The configuration that a command line results in."""

    config: PPOConfig
    """The configuration, with defaults in place of wrong values."""
    notes: list[Note]
    problems: list[str]
    """A line for each problem; empty if the configuration can be used."""
    composed: DictConfig | None = None
    """The tree that Hydra composed."""
    pictures: bool = False
    """Whether it is for a model that sees, and a built-in one stands in that reads text alone."""


def load_config(
    overrides: Sequence[str] = (),
    *,
    config_path: str | Path | None = None,
    config_name: str = DEFAULT_NAME,
    config_dir: str | Path | None = None,
    mode_dir: Path | None = None,
) -> PPOConfig:
    """The configuration of a run: the YAML file `config_name`, changed by `overrides`.

    `config_path` is the directory of `config_name` (default: the built-in one); relative paths start at the working
    directory, then at verl/trainer and beside `mode_dir`, as verl's `--config-path=config` does. A user's file can
    always include the built-in files (`defaults: [ppo_trainer, _self_]`) and those in `mode_dir`. `config_dir` is one
    more directory to search. Raises ConfigError with a line for each problem.
    """
    resolved = resolve_config(
        overrides, config_path=config_path, config_name=config_name, config_dir=config_dir, mode_dir=mode_dir
    )
    if resolved.problems:
        raise ConfigError("\n".join(resolved.problems))
    return resolved.config


def resolve_config(overrides: Sequence[str] = (), **where: Any) -> Resolved:
    """As `load_config`, but returns the problems. Raises ConfigError if nothing can be composed."""
    problems: list[str] = []
    composed = compose_tree(overrides, problems=problems, **where)
    resolved = resolved_tree(composed, set_keys(overrides), problems)
    return replace(resolved, notes=[*resolved.notes, *_of_hydra(overrides)])


def _of_hydra(overrides: Sequence[str]) -> Iterator[Note]:
    """Hydra's own keys, such as `hydra.run.dir`, that only its `main` obeys."""
    for text in overrides:
        key, _, value = text.lstrip("+").partition("=")
        if key.startswith("hydra.") and key != "hydra.searchpath":
            yield Note(key=key, value=value, why="what a run writes is in trainer.default_local_dir")


def resolved_tree(composed: DictConfig, explicit: Collection[str] = (), problems: Sequence[str] = ()) -> Resolved:
    """As `resolve_config`, for a tree composed by Hydra, here or in a user's script (`hydra.main`)."""
    try:
        values = OmegaConf.to_container(composed, resolve=True, throw_on_missing=True)
    except OmegaConfBaseException as exc:
        key = f"{exc.full_key}: " if exc.full_key else ""
        raise ConfigError("\n".join([*problems, key + _one_line(exc)])) from exc
    resolved = build_config(values, explicit)
    config = _with_backend(resolved.config)
    return replace(resolved, config=config, problems=[*problems, *resolved.problems], composed=composed)


def compose_tree(
    overrides: Sequence[str] = (),
    *,
    config_path: str | Path | None = None,
    config_name: str = DEFAULT_NAME,
    config_dir: str | Path | None = None,
    mode_dir: Path | None = None,
    problems: list[str] | None = None,
) -> DictConfig:
    """The tree that Hydra composes: override keys are checked, values neither resolved nor converted.

    Raises ConfigError; with `problems`, appends the errors of single overrides to it instead.
    """
    name = config_name.removesuffix(".yaml")
    directory = _directory(config_path, name, mode_dir)
    primary = directory / f"{name}.yaml"
    if not primary.is_file():
        known = [path.stem for path in directory.glob("*.yaml")]
        raise ConfigError(f"no configuration file {name}.yaml in {directory}.{did_you_mean(name, known)}")
    search = _search_path(primary, overrides, config_dir, mode_dir)
    roots = [directory, *(Path(url.removeprefix("file://")) for url in search if url.startswith("file://"))]
    found: list[str] = [] if problems is None else problems
    arguments = normalize(overrides, _groups(roots), found)
    if problems is None and found:
        raise ConfigError("\n".join(found))
    arguments = [text for text in arguments if not text.lstrip("+").startswith("hydra.searchpath=")]
    try:
        with initialize_config_dir(str(directory), job_name=name, version_base="1.3"):
            return compose(name, overrides=[*arguments, f"hydra.searchpath={_hydra_list(search)}"])
    except (HydraException, OmegaConfBaseException, yaml.YAMLError, UnicodeDecodeError) as exc:
        raise ConfigError("\n".join([*found, _no_such_file(_one_line(exc))])) from exc


def _with_backend(config: PPOConfig) -> PPOConfig:
    """`checkpoint_engine.backend=auto` replaced by the one for the run's device."""
    if config.checkpoint_engine.backend != "auto":
        return config
    from verl.utils.device import resolve_device  # torch: only for this

    backend = backend_of_device(resolve_device(config.trainer.device))
    return replace(config, checkpoint_engine=replace(config.checkpoint_engine, backend=backend))


def build_config(values: Any, explicit: Collection[str] = ()) -> Resolved:
    """The typed configuration of composed plain `values`; `explicit` are the keys that the command line set."""
    if not isinstance(values, Mapping):
        raise ConfigError(f"a configuration file holds a mapping, not {values!r}")
    translation = translated(values, explicit)
    problems = [key_error(key) or f"unknown configuration key {key!r}." for key in translation.unknown]
    problems += translation.problems
    notes = list(translation.notes)
    merged = with_homes(translation.values)
    take_none(merged, problems)
    try:
        merged = merge_checkpoint_engine(merged, explicit)
    except ConfigError as exc:
        problems.append(str(exc))
    followed = with_followers(merged, notes, explicit)
    wrong: list[str] = []
    config = from_mapping(PPOConfig, followed, problems=wrong)
    of_critic = {f"critic.{name}": (merged.get("critic") or {}).get(name) for name in FOLLOWING_ACTOR}
    inherited = tuple(f"{key} " for key, value in of_critic.items() if value is None)
    problems += [line for line in wrong if not line.startswith(inherited)]  # the actor's own line says it
    return Resolved(config=config, notes=notes, problems=problems, pictures=translation.pictures)


def merge_checkpoint_engine(values: Mapping[str, Any], explicit: Collection[str] = ()) -> dict[str, Any]:
    """`values` with verl's `actor_rollout_ref.rollout.checkpoint_engine` moved to the top-level section.

    A key of the top-level section counts as given if it differs from the default or is in `explicit`. Raises
    ConfigError, naming both keys, when one is given in both places with different values.
    """
    merged: dict[str, Any] = _copy(values)
    section: Any = merged
    for name in ALIAS.split(".")[:-1]:
        section = section.get(name) or {}
        if not isinstance(section, dict):
            return merged
    alias = section.pop(CANONICAL, None)
    if not alias:
        return merged
    if not isinstance(alias, Mapping):
        raise ConfigError(f"{ALIAS} is a section of keys; it cannot be set to {alias!r}")
    target = merged.setdefault(CANONICAL, {})
    _merge(target, alias, CANONICAL, explicit)
    return merged


def _merge(target: dict[str, Any], alias: Mapping[str, Any], path: str, explicit: Collection[str]) -> None:
    for name, value in alias.items():
        dotted = f"{path}.{name}"
        present = target.get(name)
        if isinstance(value, Mapping) and isinstance(present, dict):
            _merge(present, value, dotted, explicit)
            continue
        known = keys().get(dotted)
        given = dotted in explicit or (name in target and (known is None or present not in (known.default, "auto")))
        if given and present != value:
            raise ConfigError(
                f"{dotted}={present!r} and {ALIAS}{dotted.removeprefix(CANONICAL)}={value!r} are the same key with "
                "different values: set one of them"
            )
        target[name] = value


def _copy(values: Any) -> Any:
    return {key: _copy(value) for key, value in values.items()} if isinstance(values, Mapping) else values


def _directory(config_path: str | Path | None, name: str, mode_dir: Path | None) -> Path:
    """The one that has the file `name`, or the first that is there."""
    if config_path is None:
        return CONFIG_DIR
    text = str(config_path).removeprefix("file://")
    places = [Path.cwd(), CONFIG_DIR.parent, *([mode_dir.parent] if mode_dir else [])]
    candidates = [path for path in ((place / Path(text).expanduser()).resolve() for place in places) if path.is_dir()]
    for candidate in [*(path for path in candidates if (path / f"{name}.yaml").is_file()), *candidates]:
        return candidate
    raise ConfigError(f"--config-path={config_path}: no such directory")


def _search_path(
    primary: Path, overrides: Sequence[str], config_dir: str | Path | None, mode_dir: Path | None
) -> list[str]:
    """Where Hydra looks for config groups after the primary file's own directory."""
    search: list[str] = []
    if config_dir is not None:
        extra = Path(config_dir).expanduser().resolve()
        if not extra.is_dir():
            raise ConfigError(f"--config-dir={config_dir}: no such directory")
        search.append(f"file://{extra}")
    given: list[Any] = [item.value() for item in parse(overrides) if item.key_or_group == "hydra.searchpath"]
    if not given:
        try:
            given = [OmegaConf.select(OmegaConf.load(primary), "hydra.searchpath") or []]
        except (OSError, yaml.YAMLError, OmegaConfBaseException, UnicodeDecodeError) as exc:
            raise ConfigError(f"{primary} cannot be read: {_one_line(exc)}") from exc
    for item in given[-1]:
        text = str(item)
        search.append(text if "://" in text else f"file://{Path(text).resolve()}")
    return [*search, *(f"file://{directory}" for directory in (mode_dir, CONFIG_DIR) if directory)]


def _groups(roots: Sequence[Path]) -> set[str]:
    """Names of config groups: the directories below the search path that hold YAML files."""
    return {str(file.parent.relative_to(root)) for root in roots if root.is_dir() for file in root.glob("*/*.yaml")}


def _hydra_list(items: Sequence[str]) -> str:
    quoted = ",".join("'" + item.replace("'", "\\'") + "'" for item in items)
    return f"[{quoted}]"


def _no_such_file(message: str) -> str:
    """`section=value` chooses a file for the section; most who write it want to set one of its keys."""
    found = re.search(r"Could not find '(\w+)/([^']+)' Available options in '\w+': (.+)", message)
    if found is None:
        return message
    section, value, files = found.groups()
    key = next((name for name in ("backend", "name", "tool") if f"{section}.{name}" in keys()), "<key>")
    return (
        f"{section} is a section of keys, and no file {section}/{value}.yaml has values for it (files: {files}). "
        f"To set one of its keys: {section}.{key}={value}"
    )


def _one_line(exc: Exception) -> str:
    """The message of a foreign error up to its help text, on one line."""
    lines: list[str] = []
    for line in str(exc).splitlines():
        if line.startswith(("Config search path", "See http", "    full_key", "Set the environment")):
            break
        if line.strip():
            lines.append(line.strip())
    return " ".join(lines) or type(exc).__name__
