"""What the files of one training run say about how busy trainer and rollout engines were. Pure but for reading them."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from statistics import fmean, median
from typing import Any

from verl.utils.console import validation_rewards
from verl.utils.timing import TIMELINE_FILE, Span, read_spans
from verl.utils.tracking import METRICS_FILE, read_metrics

Interval = tuple[float, float]


def union(intervals: Iterable[Interval]) -> list[Interval]:
    """The same points, in intervals that neither overlap nor touch."""
    merged: list[Interval] = []
    for start, stop in sorted(intervals):
        if merged and start <= merged[-1][1]:
            merged[-1] = merged[-1][0], max(merged[-1][1], stop)
        else:
            merged.append((start, stop))
    return merged


def intersection(one: Sequence[Interval], other: Sequence[Interval]) -> list[Interval]:
    """Of two unions."""
    pairs = [(max(a, c), min(b, d)) for a, b in one for c, d in other]
    return [(start, stop) for start, stop in pairs if start < stop]


def complement(intervals: Sequence[Interval]) -> list[Interval]:
    """Of a union: everything else."""
    edges = [float("-inf"), *(edge for interval in intervals for edge in interval), float("inf")]
    return list(zip(edges[::2], edges[1::2], strict=True))


def seconds(intervals: Iterable[Interval]) -> float:
    """Of a union."""
    return sum(stop - start for start, stop in intervals)


def times(spans: Iterable[Span], role: str, name: str) -> list[Interval]:
    return union((span.start_s, span.stop_s) for span in spans if (span.role, span.name) == (role, name))


def working(spans: Sequence[Span], replica: str) -> list[Interval]:
    """When the replica had requests and was not paused."""
    generating, paused = times(spans, replica, "generating"), times(spans, replica, "paused")
    return intersection(generating, complement(paused))


def analyse(run: Path, warm_up: int, cool_down: int) -> dict[str, Any]:
    """Of a finished run in the output directory `run`, without validation and its first `warm_up` and last `cool_down`
    steps.

    Seconds are medians over steps or syncs. `trainer_idle_ratio` is the share of the steps in which the trainer waited
    for samples, `sync_ratio` that in which it waited for a sync, `rollout_idle_ratio` the share of the time in which
    an engine had nothing to do or was paused, on the mean of the engines.
    """
    records = {record["step"]: record for record in read_metrics(run / METRICS_FILE)}
    num_steps = max(records, default=0)
    steps = {step: record for step, record in records.items() if warm_up < step <= num_steps - cool_down}
    if not steps:
        raise ValueError(f"{run} has {num_steps} steps, no more than the {warm_up} + {cool_down} that do not count")
    spans = read_spans(run / TIMELINE_FILE)
    measured = [span for span in spans if span.name == "step" and span.version in steps]
    start, stop = min(span.start_s for span in measured), max(span.stop_s for span in measured)
    tests = [(a, b) for a, b in times(spans, "trainer", "testing") if start <= a < stop]
    window_s = stop - start - seconds(tests)

    def total(name: str) -> float:
        return float(sum(record.get(f"timing_s/{name}", 0.0) for record in steps.values()))

    def mean_of(name: str) -> float:
        return fmean(record[name] for record in steps.values())

    step_s = total("step") - total("testing") - total("save_checkpoint")
    outside = intersection([(start, stop)], complement(tests))
    replicas = sorted({span.role for span in spans} - {"trainer", "sync"})
    rewards = [validation_rewards(records[step]) for step in (min(records), max(records))]
    return {
        "steps": len(steps),
        "tokens": sum(record["perf/total_num_tokens"] for record in steps.values()),
        "seconds": window_s,
        "tokens_per_s": sum(record["perf/total_num_tokens"] for record in steps.values()) / window_s,
        "trainer_idle_ratio": total("gen") / step_s,
        "sync_ratio": total("update_weights") / step_s,
        "rollout_idle_ratio": fmean(
            1 - seconds(intersection(working(spans, name), outside)) / window_s for name in replicas
        ),
        "staleness_mean": mean_of("training/staleness/mean"),
        "staleness_max": max(record["training/staleness/max"] for record in steps.values()),
        "reward_before": next(iter(rewards[0].values()), None),
        "reward_after": next(iter(rewards[1].values()), None),
        "training_rewards": [records[step]["critic/score/mean"] for step in sorted(records) if step],
        **_syncs(run, spans, steps, replicas),
    }


def _syncs(run: Path, spans: Sequence[Span], steps: dict[int, Any], replicas: Sequence[str]) -> dict[str, Any]:
    reports = [json.loads(line) for line in (run / "sync_reports.jsonl").read_text().splitlines()]
    reports = [report for report in reports if report["version"] in steps and report["outcome"] == "committed"]
    versions = {report["version"] for report in reports}
    seen = [record["timing_s/update_weights"] for step, record in steps.items() if step in versions]
    loads: dict[int | None, float] = {}
    for span in spans:
        if span.name == "loading" and span.version in versions:
            loads[span.version] = max(loads.get(span.version, 0.0), span.stop_s - span.start_s)
    staging = union(
        (span.start_s, span.stop_s)
        for span in spans
        if span.role == "sync" and span.name in ("stage", "verify") and span.version in versions
    )
    paused = {report["version"]: max(report["paused_s"].values()) for report in reports}
    return {
        "syncs": len(reports),
        "nbytes": reports[-1]["nbytes_needed"],
        "sync_seen_s": median(seen),
        "sync_copy_s": median(report["trainer_blocked_s"] for report in reports),
        "sync_total_s": median(report["total_s"] for report in reports),
        "paused_s": median(paused.values()),
        "load_s": median(loads.values()),
        "paused_of_load": median(paused[version] / loads[version] for version in versions),
        "generating_while_staging": fmean(
            seconds(intersection(working(spans, name), staging)) / seconds(staging) for name in replicas
        ),
    }
