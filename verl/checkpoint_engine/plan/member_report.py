"""What each member did in a sync, in few words: a report stays small with hundreds of members. Pure."""

from __future__ import annotations

import statistics
from collections.abc import Iterable
from dataclasses import dataclass

from ..support.memory import MemoryUse

SLOWEST = 8
"""Members of a phase, and links of a sync, that a report names. The others are in its totals."""
BUSIEST_OF_NODE = 4
"""Links that a node tells of."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """What `member` read from `peer`."""

    member: str
    peer: str
    nbytes: int
    seconds: float
    """In which something was on its way, or waited for the peer."""

    @property
    def gbits_per_s(self) -> float:
        return 8 * self.nbytes / self.seconds / 1e9 if self.seconds > 0 else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Staged:
    """What one node says when it has every byte."""

    nbytes: int
    links: tuple[Link, ...] = ()
    memory: MemoryUse | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class MemberTime:
    """What the manager waited for one member in one phase, all attempts together."""

    member: str
    began_s: float
    """Since the sync began."""
    seconds: float
    nbytes: int = 0
    """That it wrote or fetched, where the phase moves bytes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PhaseReport:
    """All members of one phase."""

    members: int
    median_s: float
    nbytes: int
    slowest: tuple[MemberTime, ...]
    """At most SLOWEST, the slowest first."""

    @classmethod
    def of(cls, times: Iterable[MemberTime]) -> PhaseReport:
        """Raises statistics.StatisticsError for a phase without members."""
        known = sorted(times, key=lambda one: -one.seconds)
        return cls(
            members=len(known),
            median_s=statistics.median(one.seconds for one in known),
            nbytes=sum(one.nbytes for one in known),
            slowest=tuple(known[:SLOWEST]),
        )

    @property
    def excess_s(self) -> float:
        """How much longer the slowest member took than one in the middle."""
        return self.slowest[0].seconds - self.median_s


def largest(uses: Iterable[MemoryUse]) -> tuple[MemoryUse, ...]:
    """Those with the highest peaks."""
    return tuple(sorted(uses, key=lambda use: -use.host_peak_nbytes - use.device_peak_nbytes)[:SLOWEST])


def busiest(links: Iterable[Link], count: int = SLOWEST) -> tuple[Link, ...]:
    """Those that took longest."""
    return tuple(sorted(links, key=lambda link: -link.seconds)[:count])
