"""A run's activities as tracks of time slices, for `report` and `trace`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from verl.checkpoint_engine.plan.types import SyncReport
from verl.cli.run_files import RunFiles
from verl.utils.timing import Span

GROUPS = ("trainer", "syncs", "replicas", "members")


@dataclass(frozen=True, kw_only=True)
class Slice:
    """An activity from `start_ns` to `stop_ns` since the first moment of the run's files."""

    name: str
    start_ns: int
    stop_ns: int
    version: int | None = None
    details: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Track:
    """The activities of one member. Any two of its slices follow each other, or one contains the other."""

    group: str
    """One of GROUPS."""
    name: str
    slices: Sequence[Slice]


@dataclass(frozen=True, kw_only=True)
class Timeline:
    began_s: float
    """The first moment, in seconds since the epoch."""
    tracks: Sequence[Track]


def timeline(run: RunFiles) -> Timeline:
    """The tracks of the trainer, of the syncs (with phases inside them), and of every replica."""
    began_s = min([span.start_s for span in run.spans] + [report.began_s for report in run.reports], default=0.0)
    versions = {report.version for report in run.reports}
    found: dict[tuple[str, str], list[Slice]] = {("trainer", "trainer"): [], ("syncs", "sync"): []}
    for report in run.reports:
        found["syncs", "sync"] += _unfolded(report, began_s)
        for member, one in _of_members(report, began_s):
            found.setdefault(("members", member), []).append(one)
    for span in run.spans:
        if span.role != "sync" or span.version not in versions:  # a report says more
            found.setdefault(_place(span.role), []).append(_slice(span, began_s))
    tracks = [track for (group, name), slices in found.items() for track in _nested(group, name, slices)]
    tracks.sort(key=lambda track: (GROUPS.index(track.group), _natural(track.name)))
    return Timeline(began_s=began_s, tracks=tracks)


def _place(role: str) -> tuple[str, str]:
    return {"trainer": ("trainer", "trainer"), "sync": ("syncs", "sync")}.get(role, ("replicas", role))


def _natural(name: str) -> tuple[tuple[int, int | str], ...]:
    """replica-10 comes after replica-9."""
    return tuple((0, int(part)) if part.isdigit() else (1, part) for part in name.replace("-", " ").split())


def _slice(span: Span, began_s: float) -> Slice:
    start_ns = _ns(span.start_s - began_s)
    return Slice(
        name=span.name, start_ns=start_ns, stop_ns=max(_ns(span.stop_s - began_s), start_ns), version=span.version
    )


def _ns(seconds: float) -> int:
    return round(seconds * 1e9)


def _unfolded(report: SyncReport, began_s: float) -> Iterator[Slice]:
    """The sync, and each of its laps within it."""
    start_ns = _ns(report.began_s - began_s)
    stops = [start_ns]
    for _, seconds in report.laps:
        stops.append(stops[-1] + _ns(seconds))
    yield Slice(
        name=f"version {report.version}",
        start_ns=start_ns,
        stop_ns=stops[-1],
        version=report.version,
        details={
            "outcome": report.outcome,
            "backend": report.backend,
            "MB needed": report.nbytes_needed / 1e6,
            "MB moved": report.nbytes_moved / 1e6,
            "GB/s": report.gbytes_per_s,
            "trainer blocked s": report.trainer_blocked_s,
            "retries": report.retries,
            "replicas updated": ", ".join(report.replicas_updated),
            "replicas quarantined": ", ".join(report.replicas_quarantined),
            "error": report.error,
        },
    )
    for (phase, _), begin, end in zip(report.laps, stops[:-1], stops[1:], strict=True):
        if begin < end:
            yield Slice(name=phase, start_ns=begin, stop_ns=end, version=report.version)


def _of_members(report: SyncReport, began_s: float) -> Iterator[tuple[str, Slice]]:
    """What trainer ranks and nodes did, as far as the report names them. Of several attempts it says only the sum."""
    for phase, told in report.members.items() if not report.retries else ():
        for one in told.slowest:
            if not one.member.startswith(("trainer-", "node-")):
                continue  # replicas have tracks of their own
            start_ns = _ns(report.began_s - began_s + one.began_s)
            details = {"MB": one.nbytes / 1e6, "of members": told.members, "their median s": told.median_s}
            yield (
                one.member,
                Slice(
                    name=phase,
                    start_ns=start_ns,
                    stop_ns=start_ns + _ns(one.seconds),
                    version=report.version,
                    details=details,
                ),
            )


def _nested(group: str, name: str, slices: Iterable[Slice]) -> Iterator[Track]:
    """The slices on as few tracks as it takes for none to overlap another by a part: viewers cannot draw that."""
    lanes: list[list[Slice]] = []
    around: list[list[int]] = []
    for one in sorted(slices, key=lambda one: (one.start_ns, -one.stop_ns)):
        for lane, ends in zip(lanes, around, strict=True):
            while ends and ends[-1] <= one.start_ns:
                ends.pop()
            if not ends or one.stop_ns <= ends[-1]:
                lane.append(one)
                ends.append(one.stop_ns)
                break
        else:
            lanes.append([one])
            around.append([one.stop_ns])
    for number, lane in enumerate(lanes, start=1):
        yield Track(group=group, name=name if number == 1 else f"{name} ({number})", slices=lane)
