"""Reports of a sync by member: they name the slowest members, and stay small with hundreds. Pure."""

from __future__ import annotations

import statistics
from collections.abc import Iterable
from dataclasses import dataclass

from ..support.memory import MemoryUse

SLOWEST = 8
"""The most members of a phase, and links of a sync, that a report names. Its totals include the others."""
BUSIEST_OF_NODE = 4
"""The most links that a node reports."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """What `member` read from `peer`."""

    member: str
    peer: str
    nbytes: int
    seconds: float
    """How long a transfer was under way, or waited for the peer."""

    @property
    def gbits_per_s(self) -> float:
        return 8 * self.nbytes / self.seconds / 1e9 if self.seconds > 0 else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Staged:
    """What a node, or a rank that serves, returns from the stage phase."""

    nbytes: int
    links: tuple[Link, ...] = ()
    memory: MemoryUse | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class MemberTime:
    """How long the manager waited for one member in one phase, over all attempts."""

    member: str
    began_s: float
    """Seconds since the sync began."""
    seconds: float
    nbytes: int = 0
    """Bytes that it wrote or fetched; 0 in phases that move none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PhaseReport:
    """The times of all members in one phase."""

    members: int
    median_s: float
    nbytes: int
    slowest: tuple[MemberTime, ...]
    """At most SLOWEST members, the slowest first."""

    @classmethod
    def of(cls, times: Iterable[MemberTime]) -> PhaseReport:
        """Summarise `times`. Raises statistics.StatisticsError if there are none."""
        known = sorted(times, key=lambda one: -one.seconds)
        return cls(
            members=len(known),
            median_s=statistics.median(one.seconds for one in known),
            nbytes=sum(one.nbytes for one in known),
            slowest=tuple(known[:SLOWEST]),
        )

    @property
    def excess_s(self) -> float:
        """How much longer the slowest member took than the median one."""
        return self.slowest[0].seconds - self.median_s


def largest(uses: Iterable[MemoryUse]) -> tuple[MemoryUse, ...]:
    """The SLOWEST `uses` with the highest peaks."""
    return tuple(sorted(uses, key=lambda use: -use.host_peak_nbytes - use.device_peak_nbytes)[:SLOWEST])


def busiest(links: Iterable[Link], count: int = SLOWEST) -> tuple[Link, ...]:
    """The `count` links that took longest."""
    return tuple(sorted(links, key=lambda link: -link.seconds)[:count])
