"""Find syncs that took much longer than earlier ones, and the member that each waited for. Pure."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence

from ..plan.member_report import Link, PhaseReport
from ..plan.types import SyncReport

LEAST_KNOWN = 5
"""Syncs to compare with: fewer give no usual time."""
COMPARED = 20
TIMES, LEAST_S = 2.0, 0.5
"""A sync is an outlier if it takes TIMES the median of earlier ones, and LEAST_S seconds longer."""
UNCOUNTED = ("prepare", "wait")
"""Phases left out of the time: they wait for new members, or for rollouts to reach a boundary."""
MUCH = 0.25
"""A cause explains an outlier from this share of the excess on."""


def outlier(report: SyncReport, earlier: Sequence[SyncReport]) -> str | None:
    """One line for the log if the sync took much longer than `earlier` ones, else None."""
    known = [one for one in earlier if one.outcome == "committed"][-COMPARED:]
    if report.outcome != "committed" or len(known) < LEAST_KNOWN:
        return None
    took_s, usual_s = _counted_s(report), statistics.median(map(_counted_s, known))
    excess_s = took_s - usual_s
    if took_s < TIMES * usual_s or excess_s < LEAST_S:
        return None
    more = {
        phase: seconds - statistics.median(one.phase_s.get(phase, 0.0) for one in known)
        for phase, seconds in report.phase_s.items()
        if phase not in UNCOUNTED
    }
    phase = max(more, key=more.__getitem__)
    told = [
        f"version {report.version} took {_s(took_s)}, and {_s(usual_s)} is usual",
        *_why(report, phase, more[phase]),
    ]
    if report.retries and more[phase] < excess_s * (1 - MUCH):
        told.append("an attempt failed before" if report.retries == 1 else f"{report.retries} attempts failed before")
    return "; ".join(told)


def _why(report: SyncReport, phase: str, more_s: float) -> Iterator[str]:
    """Where `more_s` went, in words: the slowest member of the phase, and the link that kept it."""
    of_phase = report.members.get(phase)
    alone = of_phase is None or of_phase.members == 1 or of_phase.excess_s < MUCH * more_s
    if of_phase is None or alone:
        yield f"{_s(more_s)} more in {phase}" + ("" if of_phase is None else f", on {_whom(of_phase)}")
        return
    slowest = of_phase.slowest[0]
    link = _kept_by(report.links, slowest.member) if phase == "stage" else None
    at = "" if link is None else f" at {link.gbits_per_s:.2g} Gbit/s from {link.peer}"
    yield f"{_s(of_phase.excess_s)} of it waiting for {slowest.member}'s {phase}{at}"


def _whom(of_phase: PhaseReport) -> str:
    return of_phase.slowest[0].member if of_phase.members == 1 else f"all of {of_phase.members} members"


def _kept_by(links: Sequence[Link], member: str) -> Link | None:
    return next((link for link in links if link.member == member), None)


def _counted_s(report: SyncReport) -> float:
    return sum(seconds for phase, seconds in report.phase_s.items() if phase not in UNCOUNTED)


def _s(seconds: float) -> str:
    return f"{seconds:.1f} s" if seconds >= 1 else f"{seconds:.2f} s"


def slowest_of(report: SyncReport) -> str | None:
    """The member that the others waited for longest, as `node-2 (stage)`; None below a twentieth of the sync's time."""
    waits = {phase: one.excess_s for phase, one in report.members.items() if one.members > 1}
    phase = max(waits, key=waits.__getitem__, default=None)
    if phase is None or waits[phase] < 0.05 * report.total_s:
        return None
    return f"{report.members[phase].slowest[0].member} ({phase})"
