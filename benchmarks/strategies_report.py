"""The table and the plot of `benchmarks.strategies`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

COLUMNS = {
    "blocked_s": ("sync: trainer blocked", "#f58518"),
    "total_s": ("sync: total", "#4c78a8"),
    "vanilla_s": ("vanilla: trainer blocked = total", "#bab0ac"),
}


def print_table(result: dict[str, Any]) -> None:
    settings, machine = result["settings"], result["machine"]
    table = Table(
        title=f"{result['model']['nbytes'] / 2**20:.0f} MiB of bfloat16, backend {settings['backend']}; "
        f"ranks: {result['ranks']}, nodes: 1, replicas: 1"
    )
    table.add_column(f"seconds, median of {settings['repeats']}")
    for label, _ in COLUMNS.values():
        table.add_column(label, justify="right")
    table.add_column("blocked shorter by", justify="right")
    table.add_column("forward pass: longer by", justify="right")
    table.add_column(f"target: {result['target']:.0f} times")
    for name, measured in result["strategies"].items():
        row = measured["summary"]
        slowed = f"{row['slowed_s']:.3f} of {row['forward_s']:.3f}"
        verdict = "reached" if row["target_reached"] else "missed"
        table.add_row(name, *(f"{row[key]:.3f}" for key in COLUMNS), f"{row['shorter_by']:.1f} times", slowed, verdict)
    console = Console(width=120)
    console.print(table)
    console.print(f"{machine['processor']}, {machine['cores']} cores, load {machine['load_average_1min']:.1f}")


def draw(result: dict[str, Any], path: Path) -> None:
    """Three bars for each training engine."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    names = list(result["strategies"])[::-1]
    figure, axes = plt.subplots(figsize=(7, 0.8 * len(names) + 1.6), layout="constrained")
    for offset, (key, (label, colour)) in zip((0.27, 0.0, -0.27), COLUMNS.items(), strict=True):
        seconds = [result["strategies"][name]["summary"][key] for name in names]
        bars = axes.barh([row + offset for row in range(len(names))], seconds, 0.25, color=colour, label=label)
        axes.bar_label(bars, fmt="%.3f", padding=3, fontsize=8)
    axes.set_yticks(range(len(names)), names)
    axes.set_xlabel("seconds")
    axes.spines[["top", "right"]].set_visible(False)
    axes.set_title(f"{result['model']['nbytes'] / 2**20:.0f} MiB, {result['ranks']} trainer ranks, one machine")
    figure.legend(loc="outside lower center", ncols=3, frameon=False)
    figure.savefig(path, dpi=120)
    plt.close(figure)
