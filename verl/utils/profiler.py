"""verl's import path of timers for user code."""

from __future__ import annotations

from collections.abc import MutableMapping
from contextlib import AbstractContextManager
from typing import Any

from verl.utils import timing


def simple_timer(name: str, timing_raw: MutableMapping[str, float]) -> AbstractContextManager[None]:
    """Adds the seconds of the block to `timing_raw[name]`, also when it raises."""
    return timing.marked_timer(name, timing_raw)


def marked_timer(
    name: str, timing_raw: MutableMapping[str, float], color: str | None = None, **_: Any
) -> AbstractContextManager[None]:
    """As `simple_timer`. Ignores colour, domain and category, which are for a profiler's marks."""
    return timing.marked_timer(name, timing_raw)
