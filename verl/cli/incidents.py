"""Extracts a run's failures, and the recoveries after them, from its reports and metrics."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from verl.checkpoint_engine.plan.types import SyncReport
from verl.checkpoint_engine.sync.outliers import COMPARED, outlier

COUNTED = {
    "rollout/restarts": "engines restarted: {:g}",
    "training/attempt": "trainer ranks started again: {:g}",
    "reward/abandoned": "rewards abandoned at their deadline: {:g}",
    "reward/val_abandoned": "rewards of the validation abandoned at their deadline: {:g}",
    "agent_loop/retries": "requests sent again because a replica had failed: {:g}",
    "actor/skipped_steps": "optimizer steps skipped, because gradients were not finite: {:g}",
}
"""By metric that reports failures if above zero: the text. `TOTALS` count since the run began, others in a step."""
TOTALS = ("rollout/restarts", "training/attempt")


@dataclass(frozen=True, kw_only=True)
class Incident:
    """`level` is `bad`, `warning`, or `good`: a recovery."""

    step: int
    level: str
    what: str
    text: str
    at_s: float | None = None
    """Seconds since the epoch, if known."""


def incidents(reports: Sequence[SyncReport], metrics: Sequence[Mapping[str, Any]]) -> list[Incident]:
    """The incidents of a run, in the order of steps."""
    found = [*_of_syncs(reports), *_of_metrics(metrics)]
    return sorted(found, key=lambda one: one.step)


def _of_syncs(reports: Sequence[SyncReport]) -> Iterator[Incident]:
    out: set[str] = set()
    after_failure = False
    for number, report in enumerate(reports):
        common: dict[str, Any] = {"step": report.version, "at_s": report.began_s}
        if report.outcome != "committed":
            text = f"version {report.version}: {report.error or 'no reason is given'}"
            yield Incident(level="bad", what="sync aborted", text=text, **common)
        elif after_failure:
            text = f"version {report.version} reached {_named(report.replicas_updated)}"
            yield Incident(level="good", what="synced again", text=text, **common)
        after_failure = report.outcome != "committed"
        if report.outcome == "committed" and report.error:
            yield Incident(level="bad", what="sync cancelled", text=report.error, **common)
        if (slow := outlier(report, reports[max(number - COMPARED, 0) : number])) is not None:
            yield Incident(level="warning", what="slow sync", text=slow, **common)
        if report.retries:
            why = f": {'; '.join(report.failed_attempts)}" if report.failed_attempts else ""
            text = f"version {report.version} took {report.retries + 1} attempts{why}"
            yield Incident(level="warning", what="tried again", text=text, **common)
        if report.pieces_repaired:
            text = f"{report.pieces_repaired} pieces arrived wrong and were read again"
            yield Incident(level="warning", what="repaired", text=text, **common)
        if report.replicas_quarantined:
            yield Incident(level="bad", what="quarantined", text=_named(report.replicas_quarantined), **common)
        if back := out & set(report.replicas_updated):
            text = f"{_named(sorted(back))} serves version {report.version}"
            yield Incident(level="good", what="back in service", text=text, **common)
        out = (out | set(report.replicas_quarantined)) - back


def _of_metrics(metrics: Sequence[Mapping[str, Any]]) -> Iterator[Incident]:
    before: dict[str, float] = {}
    for record in metrics:
        step = int(record.get("step") or 0)
        for name, text in COUNTED.items():
            value = _number(record.get(name))
            new = value - before.get(name, 0.0) if name in TOTALS else value
            before[name] = value
            if new > 0:
                yield Incident(step=step, level="warning", what=name.split("/")[-1], text=text.format(new))
        replicas, known = _number(record.get("rollout/replicas")), before.get("rollout/replicas")
        if replicas and known and replicas != known:
            level, what = ("bad", "fewer replicas") if replicas < known else ("good", "more replicas")
            yield Incident(step=step, level=level, what=what, text=f"{known:g} before, {replicas:g} now")
        before["rollout/replicas"] = replicas or before.get("rollout/replicas", 0.0)


def _number(value: Any) -> float:
    return float(value) if isinstance(value, (int, float)) else 0.0


def _named(names: Sequence[str]) -> str:
    shown = ", ".join(names[:8]) or "no replica"
    return shown if len(names) <= 8 else f"{shown} and {len(names) - 8} more"
