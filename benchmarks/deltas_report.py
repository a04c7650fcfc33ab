"""The tables and the plot of `benchmarks.deltas`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

NAMES = {"off": "full", "always": "delta", "auto": "auto"}
COLOURS = {"off": "#9d9d9d", "always": "#4c78a8", "auto": "#54a24b"}
SECONDS = ("publish", "stage", "verify", "sync", "blocked")
SAME = 0.1
"""Of the longer sync: the ways are equally good."""


def auto_was_right(fleet: dict[str, Any]) -> bool:
    """Whether the choice was that of the shorter syncs, of the two ways measured beside it."""
    full_s, delta_s = float(fleet["ways"]["off"]["sync_s"]), float(fleet["ways"]["always"]["sync_s"])
    if abs(full_s - delta_s) <= SAME * max(full_s, delta_s):
        return True
    return bool(fleet["ways"]["auto"]["was_delta"]) == (delta_s < full_s)


def print_table(result: dict[str, Any]) -> None:
    settings, machine = result["settings"], result["machine"]
    console = Console(width=110)
    sizes = Table(title=f"{settings['size_mib']:g} MiB of bfloat16 after one step of AdamW; one thread")
    for heading in ("learning rate", "changed", "bits a change", "smaller", "full GB/s", "delta GB/s", "apply GB/s"):
        sizes.add_column(heading, justify="right")
    for row in result["codec"]:
        sizes.add_row(
            f"{row['learning_rate']:g}",
            f"{row['changed_fraction']:.2%}",
            f"{row['bits_per_change']:.2f}",
            f"{row['times_smaller']:.0f}x",
            *(f"{row[f'{key}_gb_per_s']:.2f}" for key in ("publish_full", "publish_delta", "apply")),
        )
    console.print(sizes)
    syncs = Table(title="syncs, backend tcp; link in Gbit/s, 0: one host")
    for heading in ("changed", "link", "nodes", "way", *(f"{name} s" for name in SECONDS), "sent MiB", "faster"):
        syncs.add_column(heading, justify="right")
    for fleet in result["fleets"]:
        full_s = fleet["ways"]["off"]["sync_s"]
        for way, row in fleet["ways"].items():
            syncs.add_row(
                f"{fleet['ways']['always']['changed_fraction']:.2%}",
                f"{fleet['gbit_per_s']:g}",
                str(fleet["nodes"]),
                NAMES[way],
                *(f"{row[f'{name}_s']:.3f}" for name in SECONDS),
                f"{row['sent_mib']:.1f}",
                f"{full_s / row['sync_s']:.1f}x",
            )
    console.print(syncs)
    right = [auto_was_right(fleet) for fleet in result["fleets"]]
    console.print(f"auto took the faster way, or one as fast within {SAME:.0%}: {sum(right)} of {len(right)}")
    console.print(
        f"medians of {settings['repeats']}; {machine['processor']}, {machine['cores']} cores for all hosts, "
        f"load {machine['load_average_1min']:.1f}"
    )


def draw(result: dict[str, Any], path: Path) -> None:
    """Bits of a change over how much changed, and how long syncs take."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    figure, (bits, seconds) = plt.subplots(1, 2, figsize=(9, 3.6), layout="constrained")
    rows = sorted(result["codec"], key=lambda row: row["changed_fraction"])
    bits.plot(
        [100 * row["changed_fraction"] for row in rows], [row["bits_per_change"] for row in rows], "o-", color="#4c78a8"
    )
    bits.set_xscale("log")
    bits.set_xlabel("values that changed, %")
    bits.set_ylabel("bits for each")
    bits.set_ylim(bottom=0)
    places = range(len(result["fleets"]))
    for turn, way in enumerate(NAMES):
        heights = [fleet["ways"][way]["sync_s"] for fleet in result["fleets"]]
        lefts = [place + (turn - 1) * 0.27 for place in places]
        seconds.bar(lefts, heights, 0.25, color=COLOURS[way], label=NAMES[way])
    seconds.set_xticks(
        list(places),
        [
            f"{fleet['ways']['always']['changed_fraction']:.1%}\n{fleet['gbit_per_s']:g} Gbit/s\nto {fleet['nodes']}"
            for fleet in result["fleets"]
        ],
        fontsize=7,
    )
    seconds.set_ylabel("seconds from publish to commit")
    seconds.legend(frameon=False)
    for axes in (bits, seconds):
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=120)
    plt.close(figure)
