"""What the page of a run shows, as plain data: `verl/cli/page` draws it and computes nothing else."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from verl import __version__
from verl.checkpoint_engine.plan.member_report import PhaseReport
from verl.checkpoint_engine.plan.types import SyncReport
from verl.checkpoint_engine.sync.outliers import slowest_of
from verl.cli.incidents import Incident, incidents
from verl.cli.run_files import RunFiles
from verl.cli.tracks import GROUPS, Timeline, Track, timeline

FIRST = (
    "critic/score/mean",
    "val-core/",
    "response_length/mean",
    "actor/entropy",
    "actor/grad_norm",
    "actor/pg_loss",
    "actor/kl_loss",
    "training/rollout_probs_diff_mean",
    "training/staleness/mean",
    "perf/throughput",
    "checkpoint_engine/total_s",
    "checkpoint_engine/gbytes_per_s",
)
"""Metrics that are shown at once, where they are measured: names, or what names begin with."""
PARTS = (
    ("generation, or waiting for samples", ("gen",), "--c1"),
    ("log-probs and values", ("old_log_prob", "ref", "values"), "--c2"),
    ("rewards, advantages", ("reward", "adv"), "--c3"),
    ("update of the critic", ("update_critic",), "--c4"),
    ("update of the policy", ("update_actor",), "--c5"),
    ("weight sync", ("update_weights",), "--c6"),
    ("validation", ("testing",), "--c7"),
    ("checkpoint", ("save_checkpoint",), "--c8"),
)
"""Of a step: what it is called, the phases of `timing_s/` that it is the sum of, its colour on the page."""
MOST_TRACKS = 32
"""Of a group: trainer ranks and nodes may be hundreds."""
MEMORY = {"host_peak_gb": "", "device_peak_gb": ", device"}
"""Of the metrics of memory, which are drawn, and how their chart is called behind the role."""


def report_data(run: RunFiles, samples: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    found = incidents(run.reports, run.metrics)
    drawn = timeline(run)
    stop_ns = max((one.stop_ns for track in drawn.tracks for one in track.slices), default=0)
    series = _series(run.metrics)
    return {
        "program": __version__,
        "name": run.name,
        "began_s": drawn.began_s,
        "took_s": stop_ns / 1e9,
        "tiles": list(_tiles(run, found)),
        "metrics": {
            "steps": [_step(record) for record in run.metrics],
            "series": series,
            "first": [name for begin in FIRST for name in series if name == begin or _is_below(name, begin)],
        },
        "memory": _memory(series),
        "breakdown": _breakdown(run.metrics),
        **_tracks(drawn),
        "incidents": [asdict(one) for one in found],
        "syncs": [_sync(report, drawn.began_s) for report in run.reports],
        "samples": list(samples),
    }


def _is_below(name: str, begin: str) -> bool:
    return begin.endswith("/") and name.startswith(begin)


def _step(record: Mapping[str, Any]) -> int:
    return int(record.get("step") or 0)


def _finite(value: Any) -> float | None:
    """With six digits, which a page does not show; null is what was not measured."""
    is_number = isinstance(value, (int, float)) and math.isfinite(value)
    return float(f"{value:.6g}") if is_number else None


def _series(metrics: Sequence[Mapping[str, Any]]) -> dict[str, list[float | None]]:
    names = dict.fromkeys(name for record in metrics for name in record if name != "step")
    found = {name: [_finite(record.get(name)) for record in metrics] for name in names}
    return {name: values for name, values in found.items() if any(value is not None for value in values)}


def _memory(series: Iterable[str]) -> list[dict[str, Any]]:
    """A chart for every role, with a line for every phase."""
    charts: dict[str, list[dict[str, str]]] = {}
    for metric in series:
        start, *middle, kind = metric.split("/")
        if start == "memory" and kind in MEMORY:
            role, *phase = middle
            lines = charts.setdefault(role + MEMORY[kind], [])
            lines.append({"name": "/".join(phase) or "since it began", "metric": metric})
    return [{"role": role, "lines": lines} for role, lines in sorted(charts.items())]


def _tiles(run: RunFiles, found: Sequence[Incident]) -> Iterator[tuple[Any, str, str | None]]:
    """Value, what it is, and `bad` or `warning` where somebody should look."""
    if run.metrics:
        yield _step(run.metrics[-1]), "steps", None
    rewards = [score for record in run.metrics if (score := _finite(record.get("critic/score/mean"))) is not None]
    if rewards:
        yield rewards[-1], f"reward, {rewards[0]:.3g} at first", None
    totals = [report.total_s for report in run.reports if report.outcome == "committed"]
    if totals:
        yield _seconds(statistics.median(totals)), f"median of {len(totals)} syncs", None
        yield _seconds(max(totals)), "longest sync", None
    aborted = len(run.reports) - len(totals)
    if run.reports:
        yield aborted, "syncs aborted", "bad" if aborted else None
        out = sum(len(report.replicas_quarantined) for report in run.reports)
        yield out, "replicas quarantined", "bad" if out else None
    yield sum(one.level != "good" for one in found), "failures of all kinds", "warning" if found else None


def _seconds(value: float) -> str:
    return f"{value * 1e3:.3g} ms" if value < 1 else f"{value:.3g} s"


def _breakdown(metrics: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    steps = [record for record in metrics if _finite(record.get("timing_s/step"))]
    parts = []
    rest = [_finite(record["timing_s/step"]) or 0.0 for record in steps]
    for name, phases, colour in PARTS:
        seconds = [sum(_finite(record.get(f"timing_s/{phase}")) or 0.0 for phase in phases) for record in steps]
        rest = [left - own for left, own in zip(rest, seconds, strict=True)]
        if any(seconds):
            parts.append({"name": name, "colour": colour, "seconds": [_finite(value) for value in seconds]})
    parts.append({"name": "anything else", "colour": "--rest", "seconds": [_finite(max(left, 0.0)) for left in rest]})
    return {"steps": [_step(record) for record in steps], "parts": parts}


def _tracks(drawn: Timeline) -> dict[str, Any]:
    """Slices are lists, `[name, start, stop, version, about]`, and names are numbers: there may be many of them.

    Of groups with more tracks than a page has room for, those are drawn that were busy longest.
    """
    numbers: dict[str, int] = {}
    shown = [track for group in GROUPS for track in _busiest([one for one in drawn.tracks if one.group == group])]
    tracks = [
        {
            "group": track.group,
            "name": track.name,
            "slices": [
                [
                    numbers.setdefault(one.name, len(numbers)),
                    round(one.start_ns / 1e9, 6),
                    round(one.stop_ns / 1e9, 6),
                    one.version,
                    *([{name: value for name, value in one.details.items() if value}] if one.details else []),
                ]
                for one in track.slices
            ],
        }
        for track in shown
    ]
    return {"tracks": tracks, "names": list(numbers), "tracks_left_out": len(drawn.tracks) - len(shown)}


def _busiest(tracks: Sequence[Track]) -> list[Track]:
    def busy_ns(track: Track) -> int:
        return sum(one.stop_ns - one.start_ns for one in track.slices)

    chosen = {id(track) for track in sorted(tracks, key=busy_ns, reverse=True)[:MOST_TRACKS]}
    return [track for track in tracks if id(track) in chosen]


def _slowest(told: PhaseReport) -> str:
    named = ", ".join(f"{one.member} {_seconds(one.seconds)}" for one in told.slowest[:4])
    return f"{named}; median {_seconds(told.median_s)}" if told.members > 1 else named


def _sync(report: SyncReport, began_s: float) -> dict[str, Any]:
    facts = [(f"{phase}: slowest of {told.members}", _slowest(told)) for phase, told in report.members.items()]
    facts += [
        (
            f"{link.member} from {link.peer}",
            f"{link.nbytes / 1e6:.3g} MB in {_seconds(link.seconds)}: {link.gbits_per_s:.3g} Gbit/s",
        )
        for link in report.links
    ]
    facts += [
        (f"memory of {use.process}", f"{use.host_peak_nbytes / 1e9:.3g} GB at most, {use.phase}")
        for use in report.memory
    ]
    facts += [(f"attempt {number}", text) for number, text in enumerate(report.failed_attempts, start=1)]
    facts += [(f"paused, {name}", _seconds(seconds)) for name, seconds in report.paused_s.items()]
    facts += [(f"check of {name}", check.found) for name, check in report.engine_checks.items()]
    if report.replicas_updated:
        facts.append(("serve it", ", ".join(report.replicas_updated)))
    if report.replicas_quarantined:
        facts.append(("quarantined", ", ".join(report.replicas_quarantined)))
    if report.delta is not None:
        facts.append(("deltas", report.delta.summary))
    if report.error:
        facts.append(("error", report.error))
    return {
        "version": report.version,
        "backend": report.backend,
        "outcome": report.outcome,
        "start": report.began_s - began_s,
        "began_s": report.began_s,
        "total_s": report.total_s,
        "phase_s": report.phase_s,
        "nbytes_needed": report.nbytes_needed,
        "nbytes_moved": report.nbytes_moved,
        "gbytes_per_s": report.gbytes_per_s,
        "trainer_blocked_s": report.trainer_blocked_s,
        "paused_s": max(report.paused_s.values(), default=0.0),
        "retries": report.retries,
        "slowest": slowest_of(report),
        "facts": facts,
    }
