"""Long matrices in parts: `--cells today` runs one part of each, another one every day, all of them within some days.

`make test-all` does so; `--cells all`, which is pytest's default, runs them whole. A file of which one cell stands for
many has the marker `cells(days)`, or some of its tests have. With `cells(days, by="fixture")`, tests that share this
fixture are one cell, or one for each of its parameters.

Jobs without the marker that `make test` does not run are one cell for each file, which runs every second day.
"""

from __future__ import annotations

import datetime
import os
import zlib
from collections import defaultdict

import pytest

DAYS = 2
"""Of a file of jobs without the marker."""
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
    today = int(os.environ[DAY])
    numbers: dict[tuple[str, int], dict[object, int]] = defaultdict(dict)
    kept, left_out = [], []
    for item in items:
        marker = item.get_closest_marker("cells")
        file = item.nodeid.split("::")[0]
        if marker is not None:
            (days,), by = marker.args, marker.kwargs.get("by")
            of_file = numbers[file, days]
            parameters = item.callspec.params if hasattr(item, "callspec") else {}
            number = of_file.setdefault(parameters.get(by, by) if by else item.nodeid, len(of_file))
        elif item.get_closest_marker("job") and not item.get_closest_marker("once"):
            days, number = DAYS, 0
        else:
            kept.append(item)
            continue
        first_day = zlib.crc32(file.encode())  # files of one cell do not all have the same day
        (kept if (first_day + number) % days == today % days else left_out).append(item)
    if left_out:
        items[:] = kept
        config.hook.pytest_deselected(items=left_out)


def pytest_report_header(config):
    if config.getoption("cells") == "today":
        return f"cells: those of day {os.environ[DAY]} ({DAY}); --cells all runs every one"
    return None
