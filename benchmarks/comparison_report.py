"""The tables and the plot of `benchmarks.weight_sync --backend all`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

TARGETS = {
    "stage_of_raw": ("stage / raw library", "{:.0%}", "at least"),
    "verify_of_stage": ("verify / stage", "{:.0%}", "below"),
    "blocked_shorter_by": ("trainer blocked, times shorter than under the gathered broadcast", "{:.0f}", "at least"),
}


def print_table(result: dict[str, Any]) -> None:
    settings, machine = result["settings"], result["machine"]
    size_gib = result["model"]["nbytes"] / 2**30
    table = Table(
        title=f"{size_gib:.2f} GiB from {settings['source_dtype']}; trainer ranks: {settings['trainers']}, "
        f"nodes: {settings['nodes']}; medians of {settings['repeats']}"
    )
    table.add_column("")
    headings = ("blocked s", "transfer s", "GB/s", "raw GB/s", "of raw", "verify s", "total s", "extra copies")
    for heading in headings:
        table.add_column(heading, justify="right")
    for name, measured in result["backends"].items():
        row = measured["summary"]
        table.add_row(
            name,
            *(f"{row[key]:.3f}" for key in ("blocked_s", "transfer_s")),
            *(f"{row[key]:.2f}" for key in ("transfer_gbytes_per_s", "raw_gbytes_per_s")),
            f"{row['transfer_of_raw']:.0%}",
            *(f"{row[key]:.3f}" for key in ("verification_s", "total_s")),
            f"{measured['extra_copies_of_own_shards']:.2f}",
        )
    table.add_section()
    for name, measured in result["peers"].items():
        row = measured["summary"]
        rate = result["model"]["nbytes"] / row["total_s"] / 1e9
        table.add_row(name, f"{row['blocked_s']:.3f}", "", f"{rate:.2f}", "", "", "", f"{row['total_s']:.3f}", "")
    console = Console(width=110)
    console.print(table)
    for name, found in result["targets"].items():
        for key, row in found.items():
            what, form, sign = TARGETS[key]
            verdict = "reached" if row["reached"] else "NOT reached"
            console.print(
                f"{name}: {what}: {form.format(row['value'])} (target: {sign} {form.format(row['target'])}): {verdict}"
            )
    console.print(f"{machine['processor']}, {machine['cores']} cores, load {machine['load_average_1min']:.1f}")


def draw(result: dict[str, Any], path: Path) -> None:
    """Two bars for each way: how long the trainer is blocked, and how long until the last node has every byte."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    ways = {**result["backends"], **result["peers"]}
    names = list(ways)[::-1]
    settings = result["settings"]
    figure, axes = plt.subplots(figsize=(7, 0.6 * len(names) + 1.6), layout="constrained")
    for offset, key, colour, label in (
        (0.2, "total_s", "#4c78a8", "until every node has every byte (backends: verified and committed)"),
        (-0.2, "blocked_s", "#f58518", "trainer blocked"),
    ):
        seconds = [ways[name]["summary"][key] for name in names]
        bars = axes.barh([row + offset for row in range(len(names))], seconds, 0.36, color=colour, label=label)
        axes.bar_label(bars, fmt="%.2f", padding=3, fontsize=8)
    axes.set_yticks(range(len(names)), names)
    axes.set_xlabel("seconds")
    axes.spines[["top", "right"]].set_visible(False)
    gib = result["model"]["nbytes"] / 2**30
    axes.set_title(f"{gib:.2f} GiB, {settings['trainers']} trainer ranks, {settings['nodes']} nodes, one machine")
    figure.legend(loc="outside lower center", ncols=1, frameon=False)
    figure.savefig(path, dpi=120)
    plt.close(figure)
