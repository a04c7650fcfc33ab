"""How well the model of `verl-sync plan` predicts syncs that were measured, here and by others.

    python -m benchmarks.plan_validation
    python -m benchmarks.plan_validation --published FILE.csv --predict OTHER.csv

Nothing is moved. Of our own measurements three are fitted to, the rest is predicted. Each published row is predicted
from the other ones alone; rows of `--predict`, with the same columns, from all of `--published`.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.command import conduct, parse
from benchmarks.own_syncs import fit, predict, read_measured
from benchmarks.published import Predicted, predicted, read_rows, typical_error
from benchmarks.report import Panel, Report, table
from verl.utils.config import option

DATA = Path(__file__).parent / "data"
GOOD = 0.15


@dataclass(frozen=True, kw_only=True)
class Settings:
    own: Path = option(DATA / "own_syncs.csv", "measured with benchmarks.hosts and benchmarks.deltas")
    published: Path = option(DATA / "published_syncs.csv", "rows to fit to")
    predict: Path | None = option(None, "rows to predict; None: those of --published, one by one")


def validate(settings: Settings) -> dict[str, Any]:
    """Raises OSError, ValueError for files that are not what they should be."""
    known, left_out = read_rows(settings.published)
    asked = known
    if settings.predict is not None:
        asked, left_out = read_rows(settings.predict)
    found = []
    for row in asked:
        one = predicted(row, known)
        if one is None:
            left_out[row.id] = "too few rows to fit to, or a network that is not stated"
        else:
            found.append(one)
    return {
        "own": _own(settings.own),
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
            "measured": {"stage_s": row.stage_s or None, "total_s": row.total_s},
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
        "fitted_rows": one.fitted_rows,
        "same_system": one.same_system,
    }


def _groups(found: Sequence[Predicted]) -> list[dict[str, Any]]:
    """Errors by what is known of a row."""
    groups: dict[tuple[str, bool, bool], list[Predicted]] = {}
    for one in found:
        key = (one.row.family, one.row.has_network, one.same_system)
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


OWN = {
    "way": "{way}",
    "kind": "{kind}",
    "nodes": "{nodes}",
    "Gbit/s": "{gbit_per_s:g}",
    "MiB": "{mib}",
    "stage, s": "{measured[stage_s]:.3f}",
    "stage predicted, s": "{shown_stage_s:.3f}",
    "sync, s": "{measured[total_s]:.3f}",
    "sync predicted, s": "{predicted[total_s]:.3f}",
    "ratio": "{ratio:.2f}",
}
GROUPS = {
    "mechanism": "{mechanism}",
    "network stated": "{network}",
    "fitted to systems": "{systems}",
    "rows": "{rows}",
    "factor": "{typical_factor:.2f}",
    "within 15 %": "{within_15_percent}",
    "within a factor of 2": "{within_factor_2}",
}
PUBLISHED = {
    "row": "{id}",
    "system": "{system}",
    "mechanism": "{mechanism}",
    "model": "{model}",
    "network stated": "{network}",
    "predicted, s": "{predicted_s:.2f}",
    "published, s": "{published_s:.2f}",
    "ratio": "{ratio:.2f}",
    "fitted to": "{fitted}",
}


def report(result: dict[str, Any]) -> Report:
    """The tables of docs/benchmarks/plan.md."""

    def network(row: dict[str, Any]) -> str:
        return "yes" if row["network_stated"] else "no"

    own = [
        row
        | {
            "kind": ", ".join(word for word in ("delta", "fitted") if row[word]),
            "shown_stage_s": row["predicted"]["stage_s"] if row["measured"]["stage_s"] else None,
            "ratio": row["predicted"]["total_s"] / row["measured"]["total_s"],
        }
        for row in result["own"]
    ]
    groups = [
        row | {"network": network(row), "systems": "same" if row["same_system"] else "others"}
        for row in result["groups"]
    ]
    published = [
        row | {"network": network(row), "fitted": f"{row['fitted_rows']}, {'same' if row['same_system'] else 'others'}"}
        for row in result["published"]
    ]
    errors = [abs(row["ratio"] - 1) for row in own if not row["fitted"]]
    panel = Panel(
        kind="points",
        series={
            "measured here": [
                (row["measured"]["total_s"], row["predicted"]["total_s"]) for row in own if not row["fitted"]
            ],
            **{
                f"published, fitted to {systems}": [
                    (row["published_s"], row["predicted_s"]) for row in published if row["same_system"] == same
                ]
                for systems, same in (("the same system", True), ("other systems", False))
            },
        },
        x="seconds measured or published",
        y="seconds predicted",
        scale="log",
    )
    return Report(
        [
            table("measured here", OWN, own),
            f"{len(errors)} predicted, totals off by {median(errors):.0%}, {max(errors):.0%} at most",
            table("published, each row predicted from others", GROUPS, groups),
            table("", PUBLISHED, published),
            "\n".join(f"left out: {name}: {reason}" for name, reason in result["left_out"].items()),
        ],
        [panel],
    )


def main(arguments: list[str] | None = None) -> int:
    settings, output = parse("plan_validation", __doc__, Settings, arguments)
    return conduct("plan_validation", settings, output, lambda: validate(settings), report)


if __name__ == "__main__":
    sys.exit(main())
