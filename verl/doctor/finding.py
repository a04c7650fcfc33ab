"""What a check says: one line."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

State = Literal["ok", "slow", "wrong"]
STATES: tuple[State, ...] = ("ok", "slow", "wrong")


@dataclass(frozen=True, kw_only=True)
class Finding:
    check: str
    """A few words: `shared memory`, `bandwidth`."""
    where: str
    """A host, or `a -> b`."""
    state: State
    """slow: a job runs, and waits for it. wrong: a job does not start, or does not end well."""
    found: str
    remedy: str = ""
    """What to do, unless all is well."""
    value: float | None = None
    """What was measured, in the unit that `found` names."""


def worst(findings: list[Finding]) -> State:
    return max((finding.state for finding in findings), key=STATES.index, default="ok")


def can_sync(findings: list[Finding]) -> bool:
    """Whether the backend has all that it needs, so that a sync says something new."""
    return not any(finding.check == "backend" and finding.state == "wrong" for finding in findings)
