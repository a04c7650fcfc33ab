"""What a comparison of two runs finds."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Difference:
    """One value that is another in the other run."""

    kind: str
    """`samples`, `metrics` or `checkpoint`."""
    what: str
    """The metric, the sample and its column, or the tensor."""
    a: Any
    b: Any
    place: int | None = None
    """The first token, or element, that differs."""
    uid: str | None = None
    """Of a sample, in the first run."""
    count: int | None = None
    """Elements of a tensor that differ."""


@dataclass
class Compared:
    """How much was looked at up to the first step that differs."""

    steps: int = 0
    metrics: int = 0
    samples: int = 0
    checkpoints: list[int] = field(default_factory=list)
    tensors: int = 0
