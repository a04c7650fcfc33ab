"""Check that megatron-core is installed."""

from __future__ import annotations

import importlib.util

from verl.utils.config import ConfigError


def require_installed() -> None:
    """Raises ConfigError if megatron-core is not installed. Does not import it."""
    if importlib.util.find_spec("megatron") is None or importlib.util.find_spec("megatron.core") is None:
        raise ConfigError("strategy=megatron needs the package 'megatron-core': pip install 'verl-sync[megatron]'")
