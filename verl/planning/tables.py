"""A plan as tables for the terminal."""

from __future__ import annotations

from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from verl.planning.forecast import TIMED, Forecast
from verl.planning.memory import Need
from verl.planning.planned import Planned
from verl.planning.simulation import Outcome

MARKS = {True: "fits", False: "[red]does NOT fit[/]", None: ""}
BOUNDS = {"fast": "faster", "slow": "slower"}
MOST_HELPS = 3
LOOK: dict[str, Any] = {
    "box": SIMPLE_HEAD,
    "padding": 0,
    "pad_edge": False,
    "title_justify": "left",
    "caption_justify": "left",
}


def show(result: Planned, console: Console | None = None) -> None:
    console = console or Console(highlight=False)
    layout, job = result.plan.layout, result.job
    where = "on the trainers' hosts" if job.colocated else f"on {job.rollouts.count} hosts of their own"
    console.print(
        f"[bold]{result.model.name}[/]: {_count(result.model.parameters)} parameters in {len(layout.specs)} tensors, "
        f"{_gb(layout.payload_nbytes)} as {job.dtype}"
    )
    console.print(
        f"{job.trainers.ranks} trainer ranks on {job.trainers.count} hosts ({job.strategy}), {job.replicas} replicas "
        f"of {job.rollout_tp} {where}, {8 * job.fabric.host_bytes_per_s / 1e9:g} Gbit/s a host"
    )
    console.print(f"{len(result.plan)} pieces; a rank publishes {_gb(min(result.owned))} to {_gb(max(result.owned))}\n")
    for delta in sorted({one.delta for one in result.forecasts}):
        console.print(_ways(result, delta=delta))
    console.print(_phases(result.best))
    console.print(_memory(result.memory))
    for bound, outcomes in result.steps:
        console.print(_steps(bound, outcomes))
    best = result.best
    console.print(f"[bold]best: {_name(best)}[/], {_span(best.fast.total, best.slow.total)} s; bound by {best.bound}")
    for what, saved in best.helps[:MOST_HELPS]:
        console.print(f"  {what}: up to {_seconds(saved)} s less")
    for note in result.notes:
        console.print(f"note: {note}", markup=False)
    for backend, reason in result.unavailable.items():
        console.print(f"left out: {backend}: {reason}", markup=False)
    measured = ", ".join(sorted(result.hardware.measured)) or "none"
    console.print(f"rates that were measured: {measured}; others are bounds (docs/plan.md)", markup=False)


def _ways(result: Planned, *, delta: bool) -> Table:
    """Ways that come out the same are one row."""
    trainers = {f"trainer-{rank}" for rank in range(result.job.trainers.ranks)}
    nbytes = result.plan.layout.payload_nbytes
    rows: dict[tuple[str, ...], list[str]] = {}
    for one in sorted(result.forecasts, key=lambda found: found.slow.total):
        if one.delta is not delta:
            continue
        sent = sum(count for name, count in one.way.sent_nbytes.items() if name in trainers)
        row = (
            one.way.topology,
            f"{sent / nbytes:.2f}",
            str(max(one.way.hops.values(), default=0)),
            _span(one.fast.phases["stage"], one.slow.phases["stage"]),
            _span(one.fast.total, one.slow.total),
            one.bound,
        )
        rows.setdefault(row, []).append(one.way.backend)
    what = f"with deltas of {result.job.changed:.3g} of all values" if delta else "in full"
    table = Table(title=f"seconds of a sync {what}, at the fastest and the slowest", **LOOK)
    for heading in ("topology", "backends"):
        table.add_column(heading)
    for heading in ("sent", "hops", "stage", "total"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("bound by")
    for (topology, *columns), backends in rows.items():
        table.add_row(topology, ", ".join(backends), *columns)
    table.caption = "sent: by trainer ranks, of a version in full, in models"
    return table


def _phases(best: Forecast) -> Table:
    table = Table(title=f"phases of {_name(best)}, seconds", **LOOK)
    for phase in (*TIMED, "total"):
        table.add_column(phase, justify="right", no_wrap=True)
    spans = (_span(best.fast.phases[name], best.slow.phases[name]) for name in TIMED)
    table.add_row(*spans, _span(best.fast.total, best.slow.total))
    return table


def _memory(needs: tuple[Need, ...]) -> Table:
    table = Table(title="memory of the host or device that needs most, GiB", **LOOK)
    for heading in ("where", "phase"):
        table.add_column(heading)
    for heading in ("needs", "has"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("", no_wrap=True)
    table.add_column("of it", overflow="fold")  # no word of a remedy may be cut off
    for need in needs:
        has = "" if need.available_nbytes is None else _gib(need.available_nbytes)
        parts = ", ".join(f"{what} {_gib(nbytes)}" for what, nbytes in need.parts if nbytes)
        table.add_row(need.where, need.phase, _gib(need.nbytes), has, MARKS[need.fits], parts)
    return table


def _steps(bound: str, outcomes: tuple[Outcome, ...]) -> Table:
    table = Table(title=f"simulated steps, syncs at their {BOUNDS[bound]} bound", **LOOK)
    table.add_column("mode")
    for heading in ("step s", "tokens/s", "trainer waits", "for syncs", "engines idle", "staleness"):
        table.add_column(heading, justify="right")
    table.add_column("who waits")
    for one in outcomes:
        shares = (one.waits_for_samples, one.waits_for_sync, one.engines_idle)
        table.add_row(
            one.mode,
            f"{one.step_s:.1f}",
            f"{one.tokens_per_s:.0f}",
            *(f"{share:.1%}" for share in shares),
            f"{one.staleness:.2f}, {one.most_staleness}",
            one.waiting_side,
        )
    return table


def _name(one: Forecast) -> str:
    return f"{one.way.name}{', delta' if one.delta else ''}"


def _span(fast: float, slow: float) -> str:
    low, high = _seconds(fast), _seconds(slow)
    return low if low == high else f"{low}-{high}"


def _seconds(value: float) -> str:
    return f"{value:.0f}" if value >= 100 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def _gb(nbytes: float) -> str:
    return f"{nbytes / 1e9:.2f} GB" if nbytes < 1e12 else f"{nbytes / 1e12:.2f} TB"


def _gib(nbytes: float) -> str:
    return f"{nbytes / 2**30:.1f}"


def _count(parameters: int) -> str:
    for limit, letter in ((1e12, "T"), (1e9, "G"), (1e6, "M")):
        if parameters >= limit:
            return f"{parameters / limit:.2f} {letter}"
    return str(parameters)
