"""The one writer of what benchmarks report: Markdown tables, as they stand in docs/benchmarks, and a plot."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import cycle
from pathlib import Path
from statistics import median
from string import Formatter
from typing import Any, Literal

INCHES_PER_BAR = 0.22


def medians(samples: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Of every number but the version."""
    return {key: median(sample[key] for sample in samples) for key in samples[0] if key != "version"}


def table(title: str, columns: Mapping[str, str], rows: Iterable[Mapping[str, Any]]) -> str:
    """In Markdown, padded so that a console shows it as well.

    `columns`: headings, and the format of a cell, which names what it shows of the row: `{summary[total_s]:.3f}`. Empty
    is a cell that shows None. Raises KeyError for what a row does not have.
    """
    head, lines = list(columns), [[cell(form, row) for form in columns.values()] for row in rows]
    numeric = [all(text[:1] in "+-0123456789" for text in column) for column in zip(*lines, strict=True)]
    widths = [max(3, *map(len, column)) for column in zip(head, *lines, strict=True)]
    rule = ["-" * (width - right) + ":" * right for width, right in zip(widths, numeric, strict=True)]

    def padded(line: Sequence[str]) -> str:
        texts = zip(line, widths, numeric, strict=True)
        return " | ".join(text.rjust(width) if right else text.ljust(width) for text, width, right in texts)

    body = "\n".join(f"| {padded(line)} |" for line in (head, rule, *lines))
    return f"{title}\n\n{body}" if title else body


def cell(form: str, row: Mapping[str, Any]) -> str:
    shown = [Formatter().get_field(name, (), row)[0] for _, name, _, _ in Formatter().parse(form) if name is not None]
    return "" if None in shown else form.format_map(row)


def target(value: float, bound: float, sign: Literal["at least", "at most", "below"]) -> dict[str, Any]:
    """A value beside its target, and whether it reaches it."""
    reached = {"at least": value >= bound, "at most": value <= bound, "below": value < bound}[sign]
    return {"value": value, "target": bound, "sign": sign, "reached": reached}


def verdict(what: str, form: str, found: Mapping[str, Any]) -> str:
    """A line about a `target`, whose numbers have the format `form`."""
    word = "reached" if found["reached"] else "NOT reached"
    return f"{what}: {form.format(found['value'])} (target: {found['sign']} {form.format(found['target'])}): {word}"


@dataclass(frozen=True, kw_only=True)
class Panel:
    """A part of a plot. `series`: by label, pairs of a place (a name for bars) and a height."""

    kind: Literal["bars", "stacked bars", "lines", "points"]
    series: Mapping[str, Sequence[tuple[Any, float]]]
    x: str = ""
    y: str = ""
    scale: Literal["linear", "log"] = "linear"
    """Of the numbers along x. Points have it along y as well, and a line where both are equal."""
    form: str = "%.2f"
    """Of the number beside a bar."""


@dataclass(frozen=True)
class Report:
    parts: Sequence[str]
    """Tables and lines."""
    panels: Sequence[Panel] = ()
    title: str = ""
    """Of the plot."""

    def text(self, where: str) -> str:
        """`where`: the machine."""
        return "\n\n".join([*self.parts, where])

    def write(self, folder: Path, where: str) -> list[str]:
        """`tables.md`, and `plot.png` if there is anything to plot; the names of both."""
        (folder / "tables.md").write_text(self.text(where) + "\n")
        if not self.panels:
            return ["tables.md"]
        draw(self, folder / "plot.png")
        return ["tables.md", "plot.png"]


def draw(report: Report, path: Path) -> None:
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    bars = max((sum(map(len, panel.series.values())) for panel in report.panels if "bars" in panel.kind), default=0)
    size = (4.8 * len(report.panels) + 2, max(4.0, INCHES_PER_BAR * bars + 1.5))
    figure, (places,) = plt.subplots(1, len(report.panels), figsize=size, layout="constrained", squeeze=False)
    for axes, panel in zip(places, report.panels, strict=True):
        if "bars" in panel.kind:
            _bars(axes, panel)
        else:
            for (label, points), marker in zip(panel.series.items(), cycle("osv^D"), strict=False):
                line = "-" if panel.kind == "lines" else ""
                xs, ys = [x for x, _ in points], [y for _, y in points]
                axes.plot(xs, ys, marker=marker, linestyle=line, markersize=4, label=label)
            axes.set_xscale(panel.scale)
            if panel.kind == "points":
                axes.set_yscale(panel.scale)
                axes.axline((1, 1), (10, 10), color="grey", linewidth=1)
        axes.set(xlabel=panel.x, ylabel=panel.y)
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(frameon=False, fontsize=7)
    figure.suptitle(report.title, fontsize=10)
    figure.savefig(path, dpi=120)
    plt.close(figure)


def _bars(axes: Any, panel: Panel) -> None:
    """Along x, the first name on top; side by side, or one after the other."""
    names = list(dict.fromkeys(name for points in panel.series.values() for name, _ in points))
    stacked = panel.kind == "stacked bars"
    thickness = 0.8 if stacked else 0.8 / len(panel.series)
    ends = [0.0] * len(names)
    for turn, (label, points) in enumerate(panel.series.items()):
        lengths = [dict(points).get(name, 0.0) for name in names]
        rows = [row if stacked else row - 0.4 + (turn + 0.5) * thickness for row in range(len(names))]
        drawn = axes.barh(rows, lengths, 0.95 * thickness, left=ends if stacked else None, label=label)
        if stacked:
            ends = [end + length for end, length in zip(ends, lengths, strict=True)]
        else:
            axes.bar_label(drawn, fmt=panel.form, padding=2, fontsize=7)
    axes.set_yticks(range(len(names)), names)
    axes.invert_yaxis()
