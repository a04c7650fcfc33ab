"""The result of a check: one line."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

State = Literal["ok", "slow", "wrong"]
STATES: tuple[State, ...] = ("ok", "slow", "wrong")


@dataclass(frozen=True, kw_only=True)
class Finding:
    check: str
    """The check's name: `shared memory`, `bandwidth`."""
    where: str
    """The host, or `a -> b`."""
    state: State
    """slow: a job runs, but this delays it. wrong: a job does not start, or fails."""
    found: str
    remedy: str = ""
    """The remedy, unless all is well."""
    value: float | None = None
    """The measured value, in the unit that `found` names."""


def worst(findings: list[Finding]) -> State:
    return max((finding.state for finding in findings), key=STATES.index, default="ok")


def can_sync(findings: list[Finding]) -> bool:
    """Whether the backend has all that it needs, so that a trial sync is worthwhile."""
    return not any(finding.check == "backend" and finding.state == "wrong" for finding in findings)
