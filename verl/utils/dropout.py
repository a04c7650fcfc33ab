"""Finds the fields of a model's configuration that drop or disturb activations at random in training."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from verl.utils.config import ConfigError

OFF, KEEP = "off", "keep"
CHOICES = (OFF, KEEP)
_NAMES = re.compile(r"drop|jitter|(router|gate|gating|moe|expert).*nois")
"""Dropout of attention, residuals, embeddings, activations, paths and layers; noise on what routers see."""

Path = tuple[str, ...]


def is_random(name: str, value: Any) -> bool:
    """Whether a field of this name and value is a probability of dropping, or the size of a noise."""
    if isinstance(value, list | tuple):
        return any(is_random(name, each) for each in value)
    number = isinstance(value, int | float) and not isinstance(value, bool)
    return number and 0 < value <= 1 and _NAMES.search(name) is not None


def random_fields(fields: Mapping[str, Any]) -> Iterator[tuple[Path, Any]]:
    """(path, value) of each such field in `fields`, which may be nested."""
    for name, value in fields.items():
        if isinstance(value, Mapping):
            yield from (((name, *path), inner) for path, inner in random_fields(value))
        elif is_random(name, value):
            yield (name,), value


def none_of(value: Any) -> Any:
    """0, in the shape of `value`."""
    return type(value)(none_of(each) for each in value) if isinstance(value, list | tuple) else type(value)(0)


def require_no_random(override_config: Mapping[str, Any], dropout: str) -> None:
    """Raises ConfigError for an override that drops activations in a run without dropout."""
    if dropout == KEEP:
        return
    for path, value in random_fields(override_config):
        raise ConfigError(
            f"override_config.{'.'.join(path)}={value}, but with dropout={OFF} nothing is dropped: "
            f"set dropout={KEEP}, or leave the override out"
        )
