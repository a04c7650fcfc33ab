"""Files marked `cells(days)` run in parts."""

from __future__ import annotations

import re

import pytest

MATRIX = """
import pytest

@pytest.mark.cells(3)
@pytest.mark.parametrize("cell", range(7))
def test_a_matrix(cell):
    print(f"cell {cell}")

@pytest.fixture(scope="module", params=["p", "q"])
def way(request):
    return request.param

@pytest.mark.cells(2, by="way")
@pytest.mark.parametrize("number", range(3))
def test_that_shares(way, number):
    print(f"way {way}{number}")

def test_always():
    print("always")
"""
JOBS = """
import pytest

@pytest.mark.job
@pytest.mark.parametrize("number", range(3))
def test_a_job(number):
    print(f"job {number}")

@pytest.mark.job
@pytest.mark.once
def test_of_make_test():
    print("once")
"""


INI = "[pytest]\nasyncio_default_fixture_loop_scope = function\nmarkers =\n    cells\n    job\n    once"


@pytest.fixture
def ran(pytester, monkeypatch):
    """Runs it on a day; says which cells ran, and whether the other test did."""
    pytester.makepyfile(matrix_test=MATRIX, jobs_test=JOBS)
    pytester.makeini(INI)

    def run(day: int, *options: str) -> tuple[set[int], bool]:
        text = said(day, *options)
        return {cell for cell in range(7) if f"cell {cell}" in text}, "always" in text

    def said(day: int, *options: str) -> str:
        monkeypatch.setenv("VERL_TESTS_DAY", str(day))
        return "\n".join(pytester.runpytest_inprocess("-p", "tests.cells", "-s", *options).outlines)

    run.said = said
    return run


def test_each_day_runs_another_part_and_all_of_them_have_run_in_the_end(ran):
    parts = [ran(day, "--cells", "today")[0] for day in range(3)]
    assert sorted(parts, key=min) == [{0, 3, 6}, {1, 4}, {2, 5}]
    assert ran(3, "--cells", "today") == (parts[0], True)


def test_tests_that_share_a_fixture_run_on_the_same_day(ran):
    days = [re.findall(r"way (p|q)\d", ran.said(day, "--cells", "today")) for day in range(2)]
    assert sorted(days) == [["p"] * 3, ["q"] * 3]


def test_jobs_that_are_not_in_make_test_run_every_second_day_all_of_a_file_together(ran):
    days = [re.findall(r"job \d|once", ran.said(day, "--cells", "today")) for day in range(2)]
    assert sorted(days) == [["job 0", "job 1", "job 2", "once"], ["once"]]


def test_by_default_every_cell_runs(ran):
    assert ran(1) == (set(range(7)), True)


def test_the_header_says_which_day_it_was_so_that_it_can_be_run_again(pytester, monkeypatch):
    monkeypatch.setenv("VERL_TESTS_DAY", "740000")
    pytester.makeini("[pytest]\nasyncio_default_fixture_loop_scope = function")
    pytester.makepyfile("def test_nothing(): ...")
    told = pytester.runpytest_inprocess("-p", "tests.cells", "--cells", "today")
    told.stdout.fnmatch_lines(["cells: those of day 740000 (VERL_TESTS_DAY); --cells all runs every one"])
