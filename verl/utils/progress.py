"""The progress of a phase of a training step, as its workers count it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Progress:
    """`done` of `total` so far."""

    done: int
    total: int
    unit: str
    """The counted things, in the plural."""
    tokens: int = 0
    """Tokens generated for the finished ones; 0 for a phase without generation."""

    def __add__(self, other: Progress) -> Progress:
        """The sum of both, which count the same things."""
        return Progress(self.done + other.done, self.total + other.total, self.unit, self.tokens + other.tokens)

    def text(self, seconds: float) -> str:
        """`120/512 answers, 3.1k tok/s`, for a phase that has taken so many `seconds`."""
        return f"{self.done}/{self.total} {self.unit}" + (f", {_rate(self.tokens / seconds)}" if self.tokens else "")


def _rate(tokens_per_s: float) -> str:
    return f"{tokens_per_s / 1e3:.1f}k tok/s" if tokens_per_s >= 1e3 else f"{tokens_per_s:.0f} tok/s"
