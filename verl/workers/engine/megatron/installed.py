"""Whether megatron-core is there."""

from __future__ import annotations

import importlib.util

from verl.utils.config import ConfigError


def require_installed() -> None:
    """Imports nothing. Raises ConfigError if megatron-core is not there."""
    if importlib.util.find_spec("megatron") is None or importlib.util.find_spec("megatron.core") is None:
        raise ConfigError("strategy=megatron needs the package 'megatron-core': pip install 'verl-sync[megatron]'")
