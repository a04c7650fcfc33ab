"""The interactions of a YAML file, by name."""

from __future__ import annotations

import inspect
from functools import cache
from pathlib import Path
from typing import Any

from verl.interactions.base import BaseInteraction
from verl.utils.config import ConfigError
from verl.utils.loading import load_class, read_entries

CONFIG_KEY = "actor_rollout_ref.rollout.multi_turn.interaction_config_path"
METHODS = {
    "start_interaction": ("instance_id",),
    "generate_response": ("instance_id", "messages"),
    "finalize_interaction": ("instance_id",),
}


@cache
def initialize_interactions_from_config(interaction_config_file: str | Path) -> dict[str, BaseInteraction]:
    """Made once per process. Raises ConfigError.

    The file holds `interaction:`, a list of entries with `class_name` ("module.Class", "file.py:Class"), and optionally
    `name` (or else that of the class, without `Interaction`, in small letters) and `config`.
    """
    path = str(interaction_config_file)
    interactions: dict[str, BaseInteraction] = {}
    for where, entry in read_entries(path, CONFIG_KEY, "interaction", "interaction", ("name", "class_name", "config")):
        found = load_class(entry["class_name"], BaseInteraction, where)
        name = entry.get("name") or found.__name__.removesuffix("Interaction").lower()
        if name in interactions:
            raise ConfigError(f"{where}: two interactions are called {name!r}")
        interactions[name] = _made(found, {"name": name, **(entry.get("config") or {})}, where)
    return interactions


def _made(interaction_class: type[Any], config: dict[str, Any], where: str) -> BaseInteraction:
    try:
        interaction: BaseInteraction = interaction_class(config=config)
        for name, arguments in METHODS.items():
            inspect.signature(getattr(interaction, name)).bind(*arguments)
    except Exception as exc:
        raise ConfigError(f"{where}: {interaction_class.__name__}: {exc}") from exc
    return interaction
