"""The table of `benchmarks.parameter_server`."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.table import Table

OF_RAW = 0.85
"""Target for a stage: of what its library does alone."""
OVERLAP = 1.25
"""Target for the whole: at most so many times the slowest stage, and one bucket."""


def print_table(result: dict[str, Any]) -> None:
    settings, machine = result["settings"], result["machine"]
    table = Table(
        title=f"ParameterServer: {result['model']['nbytes'] / 2**30:.2f} GiB {settings['dtype']}, "
        f"buckets of {settings['bucket_megabytes']} MiB"
    )
    table.add_column(f"median of {settings['repeats']}")
    headings = (
        "update, s",
        "moving, s",
        "fetch, s",
        "broadcast, s",
        "load, s",
        "GB/s",
        "fetch of raw",
        "broadcast of raw",
    )
    for heading in (*headings, "of bound"):
        table.add_column(heading, justify="right")
    for name, row in result["summary"].items():
        times = [f"{row[key]:.3f}" for key in ("update_s", "moving_s", "fetch_s", "broadcast_s", "load_s")]
        fractions = [_percent(row[key]) for key in ("fetch_of_raw", "broadcast_of_raw", "of_bound")]
        table.add_row(name, *times, f"{row['gbytes_per_s']:.2f}", *fractions)
    console = Console(width=max(Console().width, 132))
    console.print(table)
    console.print(f"gather metas: {result['gather_s']:.3f} s")
    for library in ("gloo", "mooncake"):
        rates = [row[library] for row in result["summary"].values()]
        console.print(f"raw {library}: {min(rates):.2f} to {max(rates):.2f} GB/s")
    console.print(
        f"targets: each stage at {OF_RAW:.0%} of raw or more without load; moving at 100 % of the bound or less\n"
        f"(bound: {OVERLAP} x the slowest stage, and one bucket in all stages)\n"
        f"{machine['processor']}, {machine['cores']} cores, load {machine['load_average_1min']:.1f}"
    )


def _percent(value: float | None) -> str:
    return "" if value is None else f"{value:.0%}"
