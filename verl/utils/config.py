"""Strict conversion of plain mappings into configuration dataclasses: `verl.checkpoint_engine.support.config`."""

from __future__ import annotations

from verl.checkpoint_engine.support.config import (
    Bounds,
    ConfigError,
    Section,
    choose_from,
    did_you_mean,
    field_types,
    from_mapping,
    option,
    section,
    to_mapping,
    written,
)

__all__ = [
    "Bounds",
    "ConfigError",
    "Section",
    "choose_from",
    "did_you_mean",
    "field_types",
    "from_mapping",
    "option",
    "section",
    "to_mapping",
    "written",
]
