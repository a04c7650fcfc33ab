"""Long matrices in parts: `--cells today` runs one part of each, another one every day, all of them within some days.

`make test` does so; `--cells all`, which is pytest's default, runs them whole. A file of which one cell stands for
many has the marker `cells(days)`, or some of its tests have.
"""

from __future__ import annotations

import datetime
import os
from collections import Counter

import pytest

DAY = "VERL_TESTS_DAY"
"""Number of the day, so that all test processes know the same one, also around midnight."""


def pytest_addoption(parser):
    parser.addoption(
        "--cells",
        choices=("all", "today"),
        default="all",
        help="of tests that are marked `cells(days)`: all of them, or one part, another one every day",
    )


def pytest_configure(config):
    os.environ.setdefault(DAY, str(datetime.datetime.now(tz=datetime.UTC).date().toordinal()))


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config, items):
    if config.getoption("cells") == "all":
        return
    today, seen = int(os.environ[DAY]), Counter()
    kept, left_out = [], []
    for item in items:
        marker = item.get_closest_marker("cells")
        if marker is None:
            kept.append(item)
            continue
        (days,) = marker.args
        of_file = str(item.path), days
        (kept if seen[of_file] % days == today % days else left_out).append(item)
        seen[of_file] += 1
    if left_out:
        items[:] = kept
        config.hook.pytest_deselected(items=left_out)


def pytest_report_header(config):
    if config.getoption("cells") == "today":
        return f"cells: those of day {os.environ[DAY]} ({DAY}); --cells all runs every one"
    return None
