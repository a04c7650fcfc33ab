"""How well the model of `verl-sync plan` predicts syncs that were measured, here and by others.

    python -m benchmarks.plan_validation
    python -m benchmarks.plan_validation --published FILE.csv --predict OTHER.csv

Nothing is moved. Of our own measurements three are fitted to, the rest is predicted. Each published row is predicted
from the other ones alone; rows of `--predict`, with the same columns, from all of `--published`.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import pandas
from numpy import exp, log

from benchmarks.command import program
from benchmarks.own_syncs import fit, predict, read_measured
from benchmarks.published import Predicted, predicted, read_rows
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
    published = []
    for row in asked:
        one = predicted(row, known)
        if one is None:
            left_out[row.id] = "too few rows to fit to, or a network that is not stated"
        else:
            published.append(_described(one))
    return {"own": _own(settings.own), "published": published, "groups": _groups(published), "left_out": left_out}


def _own(path: Path) -> list[dict[str, Any]]:
    rows = read_measured(path)
    fitted = fit(rows)
    found = []
    for row in rows:
        guess, kinds = predict(row, fitted), {"delta": row.changed, "fitted": row.is_fitted}
        found.append(
            {
                "way": f"{row.backend}, {row.topology}",
                "kind": ", ".join(kind for kind, is_so in kinds.items() if is_so),
                "nodes": row.nodes,
                "gbit_per_s": row.gbit_per_s,
                "mib": row.mib,
                "fitted": row.is_fitted,
                "stage_s": row.stage_s or None,
                "predicted_stage_s": guess["stage_s"] if row.stage_s else None,
                "total_s": row.total_s,
                "predicted_total_s": guess["total_s"],
                "ratio": guess["total_s"] / row.total_s,
            }
        )
    return found


def _described(one: Predicted) -> dict[str, Any]:
    row, systems = one.row, "same" if one.same_system else "others"
    return {
        "id": row.id,
        "system": row.system,
        "mechanism": row.family,
        "model": row.model,
        "network": "yes" if row.has_network else "no",
        "predicted_s": one.seconds,
        "published_s": row.seconds,
        "ratio": one.ratio,
        "systems": systems,
        "fitted_to": f"{one.fitted_rows}, {systems}",
    }


def _groups(published: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Errors by what is known of a row. The factor is the geometric mean of how far off."""
    if not published:
        return []
    ratios = pandas.DataFrame(published).groupby(["mechanism", "network", "systems"]).ratio
    errors = ratios.agg(
        rows="count",
        factor=lambda ratio: exp(log(ratio).abs().mean()),
        within_15_percent=lambda ratio: ratio.between(1 - GOOD, 1 / (1 - GOOD)).sum(),
        within_factor_2=lambda ratio: ratio.between(0.5, 2).sum(),
    )
    groups: list[dict[str, Any]] = errors.reset_index().to_dict("records")
    return groups


OWN = {
    "way": "{way}",
    "kind": "{kind}",
    "nodes": "{nodes}",
    "Gbit/s": "{gbit_per_s:g}",
    "MiB": "{mib}",
    "stage, s": "{stage_s:.3f}",
    "stage predicted, s": "{predicted_stage_s:.3f}",
    "sync, s": "{total_s:.3f}",
    "sync predicted, s": "{predicted_total_s:.3f}",
    "ratio": "{ratio:.2f}",
}
GROUPS = {
    "mechanism": "{mechanism}",
    "network stated": "{network}",
    "fitted to systems": "{systems}",
    "rows": "{rows}",
    "factor": "{factor:.2f}",
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
    "fitted to": "{fitted_to}",
}


def report(result: dict[str, Any]) -> Report:
    """The tables of docs/benchmarks/plan.md."""

    unfitted = [row for row in result["own"] if not row["fitted"]]
    errors = [abs(row["ratio"] - 1) for row in unfitted]
    points = {"measured here": [(row["total_s"], row["predicted_total_s"]) for row in unfitted]}
    for row in result["published"]:
        label = f"published, fitted to {row['systems']} systems"
        points.setdefault(label, []).append((row["published_s"], row["predicted_s"]))
    axes = {"x": "seconds measured or published", "y": "seconds predicted"}
    return Report(
        [
            table("measured here", OWN, result["own"]),
            f"{len(errors)} predicted, totals off by {median(errors):.0%}, {max(errors):.0%} at most",
            table("published, each row predicted from others", GROUPS, result["groups"]),
            table("", PUBLISHED, result["published"]),
            "\n".join(f"left out: {name}: {reason}" for name, reason in result["left_out"].items()),
        ],
        [Panel(kind="points", series=points, scale="log", **axes)],
    )


main = program("plan_validation", __doc__, Settings, validate, report)
if __name__ == "__main__":
    sys.exit(main())
