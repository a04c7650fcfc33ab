"""The tables and the plot of `benchmarks.hosts`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.comparison import BASELINE

COLOURS = ("#4c78a8", "#54a24b", "#f58518", "#e45756", "#b279a2", "#9d755d")


def print_table(result: dict[str, Any]) -> None:
    settings, machine = result["settings"], result["machine"]
    console = Console(width=110)
    for fleet in result["fleets"]:
        console.print(_table(result, fleet))
    for name, reason in result["unavailable"].items():
        console.print(f"left out: {name}: {reason}")
    console.print(
        f"sent: by the trainer ranks' host, in models; blocked less: than under the {BASELINE}\n"
        f"medians of {settings['repeats']}; {machine['processor']}, {machine['cores']} cores for all hosts, "
        f"load {machine['load_average_1min']:.1f}"
    )


def _table(result: dict[str, Any], fleet: dict[str, Any]) -> Table:
    settings, nbytes = result["settings"], result["model"]["nbytes"]
    table = Table(
        title=f"{nbytes / 2**30:.2f} GiB; links of {settings['gbit_per_s']:g} Gbit/s, plain TCP: "
        f"{fleet['tcp_gbit_per_s']:.2f}\ntrainer ranks: {settings['trainers']} on one host, nodes: {fleet['nodes']}, "
        "each on a host of its own"
    )
    headings = ("blocked s", "stage s", "of TCP", "verify s", "of stage", "total s", "sent", "blocked less")
    table.add_column("", no_wrap=True)
    for heading in headings:
        table.add_column(heading, justify="right")
    baseline = fleet["ways"][BASELINE]["summary"]
    for name, measured in fleet["ways"].items():
        row = measured["summary"]
        stage, of_tcp, verify, of_stage = "", "", "", ""
        if "stage_s" in row:
            rate = 8 * nbytes / row["stage_s"] / 1e9
            stage, of_tcp = f"{row['stage_s']:.3f}", f"{rate / fleet['tcp_gbit_per_s']:.0%}"
            verify, of_stage = f"{row['verify_s']:.3f}", f"{row['verify_s'] / row['stage_s']:.0%}"
        table.add_row(
            name,
            f"{row['blocked_s']:.3f}",
            *(stage, of_tcp, verify, of_stage),
            f"{row['total_s']:.3f}",
            f"{row['sent_in_models']:.2f}x",
            f"{baseline['blocked_s'] / row['blocked_s']:.0f}x",
        )
    return table


def draw(result: dict[str, Any], path: Path) -> None:
    """Over the number of nodes: how long a version is on its way, and how often the trainer's host sends it."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    fleets, settings = result["fleets"], result["settings"]
    counts = [fleet["nodes"] for fleet in fleets]
    figure, (seconds, sent) = plt.subplots(1, 2, figsize=(9, 3.6), layout="constrained")
    ideal = [8 * result["model"]["nbytes"] / fleet["tcp_gbit_per_s"] / 1e9 for fleet in fleets]
    seconds.plot(counts, ideal, "--", color="#bab0ac", label="one copy over one link, plain TCP")
    names = [name for name in fleets[0]["ways"] if all(name in fleet["ways"] for fleet in fleets)]
    for name, colour in zip(names, (*COLOURS, "#000000"), strict=False):
        rows = [fleet["ways"][name]["summary"] for fleet in fleets]
        style = {"color": colour, "marker": "o", "markersize": 4, "label": name}
        seconds.plot(counts, [row.get("stage_s", row["total_s"]) for row in rows], **style)
        sent.plot(counts, [row["sent_in_models"] for row in rows], **style)
    seconds.set_ylabel("seconds of the stage")
    sent.set_ylabel("sent by the trainer's host, models")
    for axes in (seconds, sent):
        axes.set_xlabel("rollout nodes, a host each")
        axes.set_xticks(counts)
        axes.set_ylim(bottom=0)
        axes.spines[["top", "right"]].set_visible(False)
    gib = result["model"]["nbytes"] / 2**30
    figure.suptitle(f"{gib:.2f} GiB over links of {settings['gbit_per_s']:g} Gbit/s", fontsize=10)
    figure.legend(*seconds.get_legend_handles_labels(), loc="outside lower center", ncols=4, frameon=False, fontsize=8)
    figure.savefig(path, dpi=120)
    plt.close(figure)
