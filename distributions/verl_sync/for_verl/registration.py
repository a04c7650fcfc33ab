"""Our rollout adapter in the registry of PyPI's verl, and whether it is there. verl has no public way to add one.

verl passes over a plugin that raises, and says so in a line that it does not print. So a plugin that fails speaks for
itself, and an engine that was asked to load what the adapter publishes does not start where verl has another one.
"""

from __future__ import annotations

import importlib
import sys
from importlib import metadata
from typing import Any

from ..errors import ConfigError
from ..support import envs

ENGINE = "verl_sync_for_verl"
"""What `engine_kwargs.vllm.weight_transfer_config.backend` says where weights come through the adapter."""
ADAPTER = f"{__package__}.rollout.ServerAdapter"
KEY = ("vllm", "async")
GROUP = "verl.plugins"
PLUGIN = "verl_sync"
TRIED_WITH = "0.9."
SWITCH = f"+actor_rollout_ref.rollout.engine_kwargs.vllm.weight_transfer_config.backend={ENGINE}"


def register() -> None:
    """Have verl make our adapter wherever it makes one for vLLM. Raises ConfigError if it has no place for it."""
    registry = _registry()
    if KEY not in registry:
        raise ConfigError(f"verl {metadata.version('verl')} has no rollout adapter {KEY}: {remedy()}")
    registry[KEY] = ADAPTER


def require_registered() -> None:
    """Called where the adapter is relied on. Raises ConfigError that says why it is not there, and what to do."""
    import verl  # noqa: F401 - which loads its plugins

    found = _registry().get(KEY)
    if found != ADAPTER:
        raise ConfigError(f"verl makes {found} for its vLLM servers, not {ADAPTER}: {remedy()}")


def remedy() -> str:
    """What most likely keeps the adapter out, in this process."""
    name = (__package__ or "").partition(".")[0]
    if not any(entry.name == PLUGIN for entry in metadata.entry_points(group=GROUP)):
        return f"install the wheel that brings `{name}` with pip, because verl looks for plugins in installed packages"
    if (said := envs.verl_plugins()) not in ("auto", PLUGIN) and PLUGIN not in said.split(","):
        return f"VERL_USE_EXTERNAL_PLUGINS={said} leaves it out: add {PLUGIN}, or unset the variable"
    if not (version := metadata.version("verl")).startswith(TRIED_WITH):
        return f"it is for verl {TRIED_WITH}x, and this is {version}: install verl=={TRIED_WITH}1"
    return f"`python -m {__package__}` says what fails"


def say(exc: BaseException) -> None:
    """On stderr of a process in which the plugin could not be loaded."""
    sys.stderr.write(f"{PLUGIN}: verl goes on without our rollout adapter ({exc})\n")


def _registry() -> dict[tuple[str, str], str]:
    module: Any = importlib.import_module("verl.workers.rollout.base")
    found: dict[tuple[str, str], str] | None = getattr(module, "_ROLLOUT_REGISTRY", None)
    if found is None:
        raise ConfigError(f"verl {metadata.version('verl')} keeps its rollout adapters elsewhere: {remedy()}")
    return found
