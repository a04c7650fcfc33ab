"""The table and the plot of `benchmarks.weight_sync`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

ROWS = {
    "publish_and_stage": "publish + stage",
    "verify": "verify",
    "publish_stage_verify": "publish + stage + verify",
    "activate_by_copying": "activate (copy into own memory)",
    "trainer_blocked": "trainer rank blocked (own bytes)",
}


def print_table(result: dict[str, Any]) -> None:
    summary, settings, machine = result["summary"], result["settings"], result["machine"]
    size_gib = result["model"]["nbytes"] / 2**30
    table = Table(
        title=f"{settings['backend']}: {size_gib:.2f} GiB {settings['dtype']} from {settings['source_dtype']}\n"
        f"trainer ranks: {settings['trainers']}, nodes: {settings['nodes']}, replicas: {settings['replicas']}"
    )
    table.add_column("median of " + str(settings["repeats"]))
    for heading in ("seconds", "GB/s", "of memcpy"):
        table.add_column(heading, justify="right")
    memcpy = summary["memcpy_gbytes_per_s"]
    all_ranks = summary["memcpy_all_ranks_gbytes_per_s"]
    table.add_row("memcpy, one thread", "", f"{memcpy:.2f}", "100 %")
    table.add_row(f"memcpy, {settings['trainers']} threads", "", f"{all_ranks:.2f}", f"{all_ranks / memcpy:.0%}")
    table.add_section()
    for key, label in ROWS.items():
        row = summary[key]
        fraction = f"{row['fraction_of_memcpy']:.0%}"
        table.add_row(label, f"{row['seconds']:.3f}", f"{row['gbytes_per_s']:.2f}", fraction)
    console = Console()
    console.print(table)
    shared = result["shared_memory"]
    console.print(
        f"shared memory: {shared['nbytes'] / 2**30:.2f} GiB, {shared['per_node_in_models']:.2f} x model per node; "
        f"after closing: {shared['left_after_close_nbytes']} bytes"
    )
    if "target_fraction" in summary:
        target = f"{summary['target_fraction']:.0%} of one-thread memcpy for publish + stage + verify and for a rank"
        console.print(f"target ({target}): {'reached' if summary['target_reached'] else 'NOT reached'}")
    else:
        console.print("beside the raw speed of its library: --backend all")
    console.print(f"{machine['processor']}, {machine['cores']} cores, load {machine['load_average_1min']:.1f}")


def draw(result: dict[str, Any], path: Path) -> None:
    """Every sample as a stacked bar of seconds, and the time that one-thread memcpy needs for the same bytes."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    samples, settings = result["samples"], result["settings"]
    nbytes = result["model"]["nbytes"] * settings["nodes"]
    positions = range(len(samples))
    figure, axes = plt.subplots(figsize=(7, 4), layout="constrained")
    bottom = [0.0] * len(samples)
    for phase, colour in (("publish", "#4c78a8"), ("stage", "#72b7b2"), ("verify", "#f58518"), ("activate", "#bab0ac")):
        seconds = [sample[f"{phase}_s"] for sample in samples]
        label = "activate (copy into own memory)" if phase == "activate" else phase
        axes.bar(positions, seconds, 0.6, bottom=bottom, color=colour, label=label)
        bottom = [low + added for low, added in zip(bottom, seconds, strict=True)]
    axes.hlines(
        [nbytes / sample["memcpy_gbytes_per_s"] / 1e9 for sample in samples],
        [position - 0.4 for position in positions],
        [position + 0.4 for position in positions],
        color="black",
        linewidth=2,
        label="one-thread memcpy of the same bytes",
    )
    axes.set_xticks(positions, [str(sample["version"]) for sample in samples])
    axes.set_xlabel("version")
    axes.set_ylabel("seconds")
    axes.set_title(f"{settings['backend']}, {nbytes / 2**30:.2f} GiB, {settings['trainers']} trainer ranks")
    figure.legend(loc="outside lower center", ncols=2, frameon=False)
    figure.savefig(path, dpi=120)
    plt.close(figure)
