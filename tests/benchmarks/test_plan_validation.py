"""Rows are predicted from others alone, by what their mechanism says; what is measured here, within what is claimed."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from benchmarks.plan_validation import DATA, main
from benchmarks.published import Row, fitted, predicted, read_rows

COLUMNS = (
    "id,system,mechanism,model,model_GB,trainer_gpus,rollout_gpus,rollout_layout,nic_GBps_per_gpu,seconds,seconds_hi,"
    "wire_GB_total,changed_pct"
)


def row(name: str, size: float, seconds: float, *, system: str = "a") -> Row:
    return Row(id=name, system=system, mechanism="m", model="x", seconds=seconds, family="broadcast",
               features=(1.0, size), has_network=True)  # fmt: skip


def rows_of(tmp_path: Path, *lines: str) -> tuple[dict[str, Row], dict[str, str]]:
    file = tmp_path / "rows.csv"
    file.write_text("\n".join((COLUMNS, *lines)) + "\n")
    rows, left_out = read_rows(file)
    return {one.id: one for one in rows}, left_out


def test_a_line_through_exact_rows_is_found_and_no_coefficient_is_negative():
    assert fitted([row("1", 10, 3), row("2", 20, 5), row("3", 30, 7)]).tolist() == pytest.approx([1.0, 0.2])
    slope = fitted([row("1", 10, 1), row("2", 20, 3), row("3", 30, 5)])
    assert (slope >= 0).all()
    assert slope[0] == 0


def test_a_row_is_predicted_without_itself():
    rows = [row("1", 10, 3), row("2", 20, 5), row("3", 30, 7), row("4", 40, 900)]
    found = predicted(rows[3], rows)
    assert found is not None
    assert found.seconds == pytest.approx(9.0)
    assert (found.fitted_rows, found.same_system) == (3, True)
    assert predicted(rows[0], rows[:2]) is None


def test_what_counts_follows_from_the_mechanism(tmp_path: Path):
    rows, left_out = rows_of(
        tmp_path,
        "a,x,nccl gather+broadcast,m,100,2,8,,50,4,,,",
        "b,x,reshard,m,100,16,32,TP16xDP2,50,4,,,",
        "c,x,nixl pull,m,,64,32,EP32,50,1,4,2640,",
        "d,x,sparse delta,m,100,4,8,,50,1,,,10",
        "e,x,shard copy by hand,m,100,4,8,,50,1,,,",
        "f,x,reshard,m,100,,,,50,1,,,",
    )
    assert rows["a"].features == (1.0, 2.0)  # all of it through one device
    assert rows["b"].features == (1.0, 100 * 2 / 16 / 50)  # senders are fewer than receivers of two copies
    assert rows["c"].features == (1.0, 2640 / 32 / 50)
    assert rows["c"].seconds == 2.0  # the middle of 1 to 4, in proportion
    assert rows["d"].features == (1.0, 100 / 4 / 50, 10 / 50)
    assert left_out == {"e": "another mechanism than those that are modelled", "f": "the layout is not stated"}


def test_another_file_is_refused(tmp_path: Path):
    (tmp_path / "x.csv").write_text("a,b\n1,2\n")
    with pytest.raises(ValueError, match="has no columns id"):
        read_rows(tmp_path / "x.csv")


def test_what_is_measured_here_is_predicted_within_15_percent(tmp_path: Path):
    assert main(["--output", str(tmp_path)]) == 0
    result = json.loads((tmp_path / "result.json").read_text())
    predictions = [one for one in result["own"] if not one["fitted"]]
    assert len(predictions) == 18
    for one in predictions:
        assert one["predicted_total_s"] == pytest.approx(one["total_s"], rel=0.15), one


def test_the_page_shows_the_tables_that_follow_from_the_kept_rows(tmp_path: Path):
    def rows(markdown: str) -> list[list[str]]:
        return [
            [cell.strip() for cell in line.split("|")] for line in markdown.splitlines() if re.match(r"\| ?\w", line)
        ]

    assert main(["--output", str(tmp_path)]) == 0
    page = rows((Path(__file__).parents[2] / "docs/benchmarks/plan.md").read_text())
    shown = rows((tmp_path / "tables.md").read_text())
    assert len(shown) > 100
    assert [row for row in shown if row not in page] == []


def test_rows_of_another_file_are_predicted_from_the_published_ones(tmp_path: Path):
    lines = (DATA / "published_syncs.csv").read_text().splitlines()
    aside = tmp_path / "aside.csv"
    aside.write_text("\n".join((lines[0], *[line for line in lines if line.startswith(("P01,", "P112,"))])) + "\n")
    assert main(["--predict", str(aside), "--output", str(tmp_path)]) == 0
    result = json.loads((tmp_path / "result.json").read_text())
    assert [one["id"] for one in result["published"]] == ["P01"]
    assert list(result["left_out"]) == ["P112"]
