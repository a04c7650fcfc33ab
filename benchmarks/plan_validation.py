"""How well the model of `verl-sync plan` predicts syncs that were measured, here and by others.

    python -m benchmarks.plan_validation
    python -m benchmarks.plan_validation --published FILE.csv --predict OTHER.csv

Nothing is moved. Of our own measurements three are fitted to, the rest is predicted. Each published row is predicted
from the other ones alone; rows of `--predict`, with the same columns, from all of `--published`.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.command import make_parser, run
from benchmarks.own_syncs import fit, predict, read_measured
from benchmarks.published import Predicted, predicted, read_rows, typical_error

DATA = Path(__file__).parent / "data"
GOOD = 0.15


def validate(own: Path, published: Path, others: Path | None) -> dict[str, Any]:
    """Raises OSError, ValueError for files that are not what they should be."""
    known, left_out = read_rows(published)
    asked = known
    if others is not None:
        asked, left_out = read_rows(others)
    found = []
    for row in asked:
        one = predicted(row, known)
        if one is None:
            left_out[row.id] = "too few rows to fit to, or a network that is not stated"
        else:
            found.append(one)
    return {
        "benchmark": "plan_validation",
        "own": _own(own),
        "published": [_described(one) for one in found],
        "groups": _groups(found),
        "left_out": left_out,
    }


def _own(path: Path) -> list[dict[str, Any]]:
    rows = read_measured(path)
    fitted = fit(rows)
    return [
        {
            "way": f"{row.backend}, {row.topology}",
            "nodes": row.nodes,
            "gbit_per_s": row.gbit_per_s,
            "mib": row.mib,
            "delta": row.changed is not None,
            "fitted": row.is_fitted,
            "predicted": predict(row, fitted),
            "measured": {name: value for name in ("stage_s", "total_s") if (value := getattr(row, name))},
        }
        for row in rows
    ]


def _described(one: Predicted) -> dict[str, Any]:
    row = one.row
    return {
        "id": row.id,
        "system": row.system,
        "mechanism": row.family,
        "model": row.model,
        "predicted_s": one.seconds,
        "published_s": row.seconds,
        "ratio": one.ratio,
        "network_stated": row.has_network,
        "fitted_to": one.basis,
    }


def _groups(found: Sequence[Predicted]) -> list[dict[str, Any]]:
    """Errors by what is known of a row."""
    groups: dict[tuple[str, bool, bool], list[Predicted]] = {}
    for one in found:
        key = (one.row.family, one.row.has_network, "same system" in one.basis)
        groups.setdefault(key, []).append(one)
    return [
        {
            "mechanism": family,
            "network_stated": network,
            "same_system": same,
            "rows": len(rows),
            "typical_factor": typical_error(rows),
            "within_15_percent": sum(1 - GOOD <= one.ratio <= 1 / (1 - GOOD) for one in rows),
            "within_factor_2": sum(0.5 <= one.ratio <= 2 for one in rows),
        }
        for (family, network, same), rows in sorted(groups.items())
    ]


def print_table(result: dict[str, Any]) -> None:
    console = Console(width=110)
    own = Table(title="measured here, seconds")
    for heading in ("way", "nodes", "Gbit/s", "MiB", "", "stage", "predicted", "total", "predicted", "ratio"):
        own.add_column(heading, justify="left" if heading in ("way", "") else "right")
    for row in result["own"]:
        measured, guess = row["measured"], row["predicted"]
        own.add_row(
            row["way"],
            str(row["nodes"]),
            f"{row['gbit_per_s']:g}",
            str(row["mib"]),
            ", ".join(word for word in ("delta", "fitted") if row[word]),
            f"{measured['stage_s']:.3f}" if "stage_s" in measured else "",
            f"{guess['stage_s']:.3f}",
            f"{measured['total_s']:.3f}",
            f"{guess['total_s']:.3f}",
            f"{guess['total_s'] / measured['total_s']:.2f}",
        )
    console.print(own)
    table = Table(title="published, each row predicted from others")
    for heading in ("row", "system", "mechanism", "model", "predicted s", "published s", "ratio", "fitted to"):
        table.add_column(heading, justify="right" if heading in ("predicted s", "published s", "ratio") else "left")
    for row in result["published"]:
        seconds = (f"{row['predicted_s']:.2f}", f"{row['published_s']:.2f}", f"{row['ratio']:.2f}")
        table.add_row(row["id"], row["system"], row["mechanism"], row["model"], *seconds, row["fitted_to"])
    console.print(table)
    for group in result["groups"]:
        network = "stated" if group["network_stated"] else "not stated"
        fitted = "same system" if group["same_system"] else "other systems"
        console.print(
            f"{group['mechanism']}, network {network}, fitted to {fitted}: {group['rows']} rows, typically off by a "
            f"factor of {group['typical_factor']:.2f}; {group['within_15_percent']} within 15 %, "
            f"{group['within_factor_2']} within a factor of 2",
            highlight=False,
        )
    unfitted = [row for row in result["own"] if not row["fitted"]]
    errors = [abs(row["predicted"]["total_s"] / row["measured"]["total_s"] - 1) for row in unfitted]
    console.print(f"measured here: {len(errors)} predicted, off by {median(errors):.0%}, {max(errors):.0%} at most")
    for name, reason in result["left_out"].items():
        console.print(f"left out: {name}: {reason}", highlight=False)


def draw(result: dict[str, Any], path: Path) -> None:
    """Predicted over measured seconds."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    own = [(row["measured"]["total_s"], row["predicted"]["total_s"]) for row in result["own"] if not row["fitted"]]
    others = [(row["published_s"], row["predicted_s"], "same" in row["fitted_to"]) for row in result["published"]]
    series = {
        "measured here": own,
        "published, fitted to the same system": [(x, y) for x, y, same in others if same],
        "published, fitted to other systems": [(x, y) for x, y, same in others if not same],
    }
    figure, axes = plt.subplots(figsize=(5.4, 4.2), layout="constrained")
    for (label, points), colour in zip(series.items(), ("#54a24b", "#4c78a8", "#e45756"), strict=True):
        if points:
            axes.scatter([x for x, _ in points], [y for _, y in points], s=16, color=colour, label=label)
    ends = [0.03, 400]
    axes.plot(ends, ends, color="#bab0ac", linewidth=1)
    for factor in (0.5, 2):
        axes.plot(ends, [factor * end for end in ends], "--", color="#bab0ac", linewidth=0.7)
    axes.set(xscale="log", yscale="log", xlabel="seconds measured or published", ylabel="seconds predicted")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, fontsize=8)
    figure.savefig(path, dpi=120)
    plt.close(figure)


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = make_parser("plan_validation", __doc__ or "")
    add = parser.add_argument
    add("--own", type=Path, default=DATA / "own_syncs.csv", metavar="FILE", help="measured with benchmarks.hosts")
    add("--published", type=Path, default=DATA / "published_syncs.csv", metavar="FILE", help="rows to fit to")
    add("--predict", type=Path, metavar="FILE", help="rows to predict; default: those of --published, one by one")
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> int:
    options = parse(arguments)
    return run(
        options.output,
        lambda: validate(options.own, options.published, options.predict),
        print_table=print_table,
        draw=draw,
    )


if __name__ == "__main__":
    sys.exit(main())
