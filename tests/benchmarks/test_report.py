"""The one writer of tables and plots, on numbers that are made up."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.report import Panel, Report, medians, table, target, verdict


def test_a_table_is_aligned_markdown_whose_missing_numbers_are_empty_cells():
    rows = [{"way": "gloo", "seconds": {"all": 12.3456}}, {"way": "none", "seconds": {"all": None}}]
    assert table("times", {"": "{way}", "all, s": "{seconds[all]:.2f}"}, rows).splitlines() == [
        "times",
        "",
        "|      | all, s |",
        "| ---- | -----: |",
        "| gloo |  12.35 |",
        "| none |        |",
    ]


def test_a_column_that_rows_do_not_have_is_an_error():
    with pytest.raises(KeyError, match="total_s"):
        table("", {"total": "{total_s:.1f}"}, [{"way": "gloo"}])


def test_medians_are_of_everything_but_the_version():
    assert medians([{"version": 1, "s": 3.0}, {"version": 2, "s": 1.0}, {"version": 3, "s": 2.0}]) == {"s": 2.0}


@pytest.mark.parametrize(
    ("value", "sign", "reached"),
    [
        (2, "at least", True),
        (1.9, "at least", False),
        (2, "at most", True),
        (2.1, "at most", False),
        (2, "below", False),
    ],
)
def test_a_target_is_reached_from_its_bound_on(value: float, sign: str, reached: bool):
    found = target(value, 2, sign)
    assert found["reached"] is reached
    words = "reached" if reached else "NOT reached"
    assert verdict("blocked", "{:.1f}", found) == f"blocked: {value:.1f} (target: {sign} 2.0): {words}"


@pytest.mark.parametrize("kind", ["bars", "stacked bars", "lines", "points"])
def test_text_and_plot_are_written_side_by_side(kind: str, tmp_path: Path):
    panel = Panel(kind=kind, series={"one": [(1, 2.0), (2, 3.0)], "other": [(1, 1.0), (2, 0.5)]}, x="nodes")
    assert Report(["a line"], [panel], "title").write(tmp_path, "here") == ["tables.md", "plot.png"]
    assert (tmp_path / "tables.md").read_text() == "a line\n\nhere\n"
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")
