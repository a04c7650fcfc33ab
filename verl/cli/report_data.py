"""The data of a run's page, as plain values: `verl/cli/page` draws them and computes nothing else."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from verl import __version__
from verl.checkpoint_engine.plan.member_report import PhaseReport
from verl.checkpoint_engine.plan.types import SyncReport
from verl.checkpoint_engine.support import records
from verl.checkpoint_engine.sync.outliers import slowest_of
from verl.cli.incidents import Incident, incidents
from verl.cli.run_files import RunFiles
from verl.cli.tracks import GROUPS, Timeline, Track, timeline
from verl.utils.console import HELD_OUT, validation_rewards

SCORE = "critic/score/mean"
FIRST = (
    "critic/rewards/mean",
    "actor/ppo_kl",
    "actor/pg_clipfrac",
    "critic/frac_reward_zero_std",
    "response_length/mean",
    "response_length/clip_ratio",
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
"""Names, or beginnings of names, of metrics that the page shows at once if they were measured."""
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
"""Parts of a step: name, phases of `timing_s/` that it sums, colour on the page."""
MOST_TRACKS = 32
"""The most tracks of a group: there may be hundreds of trainer ranks and nodes."""
MOST_TOLD = 500
"""The most syncs, of the newest and of the slowest each, whose details are on the page."""
MEMORY = {"host_peak_gb": "", "device_peak_gb": ", device"}
"""By metric of memory that is drawn: the name of its chart after the role."""


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
        "about": list(about(run)),
        "held_out": _held_out(run.metrics),
        "tiles": list(_tiles(run, found)),
        "metrics": {
            "steps": [_step(record) for record in run.metrics],
            "seconds": _seconds_of_steps(run, drawn.began_s),
            "saved": [_step(record) for record in run.metrics if "timing_s/save_checkpoint" in record],
            "series": series,
            "first": _first(series),
            "large": _large(series),
        },
        "memory": _memory(series),
        "breakdown": _breakdown(run.metrics),
        **_tracks(drawn),
        "incidents": [asdict(one) for one in found],
        "syncs": list(_syncs(run.reports, drawn.began_s)),
        "samples": list(samples),
    }


def comparison_data(runs: Sequence[RunFiles], samples: Sequence[Sequence[Mapping[str, Any]]]) -> dict[str, Any]:
    """The data for several runs, with `samples` of each: different settings, curves, answers to the same prompts."""
    names = _distinct([run.name for run in runs])
    series = [_series(run.metrics) for run in runs]
    steps = sorted({_step(record) for run in runs for record in run.metrics})
    together = {name: None for each in series for name in each}
    return {
        "program": __version__,
        "name": " and ".join(names),
        "runs": [
            {"name": name, "series": _on_steps(steps, run.metrics, own), "held_out": _held_out(run.metrics)}
            for name, run, own in zip(names, runs, series, strict=True)
        ],
        "about": _side_by_side(
            ({key: value for key, value in about(run) if key != "command"} for run in runs), only_differing=False
        ),
        "settings": _side_by_side((run.settings for run in runs), only_differing=True),
        "metrics": {"steps": steps, "series": {}, "saved": [], "first": _first(together), "large": _large(together)},
        "samples": _same_prompts(names, samples),
    }


def _distinct(names: Sequence[str]) -> list[str]:
    return [name if names.count(name) == 1 else f"{name} ({index})" for index, name in enumerate(names, start=1)]


def _on_steps(
    steps: Sequence[int], metrics: Sequence[Mapping[str, Any]], series: Mapping[str, Sequence[float | None]]
) -> dict[str, list[float | None]]:
    own = {_step(record): index for index, record in enumerate(metrics)}
    return {name: [None if step not in own else values[own[step]] for step in steps] for name, values in series.items()}


def _side_by_side(values: Iterable[Mapping[str, Any]], *, only_differing: bool) -> list[tuple[str, list[str]]]:
    """(key, the value in each run); what a run does not say is empty."""
    of_runs = list(values)
    keys = dict.fromkeys(key for each in of_runs for key in each)
    rows = [(key, [_written(each[key]) if key in each else "" for each in of_runs]) for key in keys]
    return [(key, row) for key, row in rows if not only_differing or len(set(row)) > 1]


def _written(value: Any) -> str:
    """As it stands in the configuration."""
    return value if isinstance(value, str) else records.encoded({"": value}).decode()[5:-1]


def _same_prompts(names: Sequence[str], samples: Sequence[Sequence[Mapping[str, Any]]]) -> list[dict[str, Any]]:
    """Of prompts that more than one run answered, the last answer of each."""
    found: dict[str, dict[str, Mapping[str, Any]]] = {}
    for name, own in zip(names, samples, strict=True):
        for sample in own:
            found.setdefault(sample["prompt"], {})[name] = sample
    return [
        {
            "prompt": prompt,
            "truth": next(iter(answers.values()))["truth"],
            "answers": [
                {"run": name, "step": one["step"], "response": one["response"], "score": one["score"]}
                for name, one in answers.items()
            ],
        }
        for prompt, answers in found.items()
        if len(answers) > 1
    ]


def _first(series: Iterable[str]) -> list[str]:
    names = list(series)
    chosen = [name for begin in FIRST for name in names if name == begin or _is_below(name, begin)]
    return [name for name in chosen if name not in _large(names)]


def _large(series: Iterable[str]) -> list[str]:
    """What people look for first, on one chart: the score in training, and the held-out one of each data source."""
    return [name for name in series if name == SCORE or HELD_OUT.fullmatch(name)]


def _held_out(metrics: Sequence[Mapping[str, Any]]) -> list[tuple[str, str]]:
    """(data source, its first and its last held-out score), or the only one."""
    told = [validation_rewards(record) for record in metrics]
    sources = dict.fromkeys(source for rewards in told for source in rewards)
    scores = {source: [f"{rewards[source]:.3g}" for rewards in told if source in rewards] for source in sources}
    return [(source, " → ".join([*values[:1], *values[1:][-1:]])) for source, values in scores.items()]


def about(run: RunFiles) -> Iterator[tuple[str, str]]:
    """The facts of a run from the record of its last start."""
    if not run.starts:
        return
    last = run.starts[-1]
    for line in last.get("overview") or ():
        name, _, text = str(line).partition(": ")
        yield name, text
    times = f", the last of {len(run.starts)} starts" if len(run.starts) > 1 else ""
    yield "began", f"{last.get('began')} on {last.get('host')}{times}"
    yield "versions", ", ".join(f"{name} {version}" for name, version in (last.get("versions") or {}).items())
    if commits := last.get("commits"):
        yield "commit", ", ".join(f"{commit} of {directory}" for directory, commit in commits.items())
    yield "command", str(last.get("command"))


def _seconds_of_steps(run: RunFiles, began_s: float) -> list[float | None]:
    """When each step was over, in s since the run began; empty if that is not known."""
    ends = {span.version: span.stop_s - began_s for span in run.spans if (span.role, span.name) == ("trainer", "step")}
    return [0.0 if _step(record) == 0 else ends.get(_step(record)) for record in run.metrics] if ends else []


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
    for source, scores in _held_out(run.metrics):
        yield scores, f"held-out {source}", None
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


def _syncs(reports: Sequence[SyncReport], began_s: float) -> Iterator[dict[str, Any]]:
    """All of them. Of a long run all there is to say stands beside the newest, the slowest, and those with trouble."""
    told = {id(report) for report in reports[-MOST_TOLD:]}
    told |= {id(report) for report in sorted(reports, key=lambda report: report.total_s)[-MOST_TOLD:]}
    for number, report in enumerate(reports, 1):
        trouble = report.outcome != "committed" or report.retries or report.error
        elsewhere = [("all there is to say", f"line {number} of sync_reports.jsonl")]
        facts = _facts(report) if trouble or id(report) in told else elsewhere
        yield _sync(report, began_s) | {"facts": facts}


def _facts(report: SyncReport) -> list[tuple[str, str]]:
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
    return facts


def _sync(report: SyncReport, began_s: float) -> dict[str, Any]:
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
    }
