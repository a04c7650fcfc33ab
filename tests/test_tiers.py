"""Which tests `make check` and `make test` leave out, and what becomes of one that should be left out and is not."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests import tiers

ROOT = Path(__file__).parents[1]

SPIN = "import time\nend = time.process_time() + 0.06\nwhile time.process_time() < end: pass\n"
CONFIG = """
[pytest]
asyncio_default_fixture_loop_scope = function
markers =
    job: see tests/tiers.py
    once: see tests/tiers.py
    vllm: needs an engine
"""


@pytest.fixture
def check(pytester, monkeypatch):
    """Runs a file of tests as `make check` does, with a small budget."""
    monkeypatch.setattr(tiers, "FILE_CPU_S", 0.1)
    monkeypatch.setitem(sys.modules, "ray", SimpleNamespace(is_initialized=lambda: False))  # others' of this process

    def run(text: str, *options: str):
        pytester.makepyfile(text)
        pytester.makeini(CONFIG)
        return pytester.runpytest_inprocess("-p", "tests.tiers", "-m", "not job", *options)

    return run


def spinning(*names: str) -> str:
    return "\n".join(f"def test_{name}():\n    " + SPIN.replace("\n", "\n    ") for name in names)


def test_what_needs_an_engine_ray_or_ranks_is_left_out(check):
    fixtures = "".join(f"@pytest.fixture\ndef {name}(): ...\n" for name in sorted(tiers.FIXTURES))
    tests = "".join(f"def test_{name}({name}): ...\n" for name in sorted(tiers.FIXTURES))
    marked = "@pytest.mark.vllm\ndef test_engine(): ...\ndef test_quick(): ...\n"
    result = check(f"import pytest\n{fixtures}{tests}{marked}")
    result.assert_outcomes(passed=1, deselected=len(tiers.FIXTURES) + 1)


def test_a_file_that_takes_more_than_its_processor_time_fails_and_says_how_to_mark_it(check):
    result = check(spinning("first", "second", "third"))
    result.assert_outcomes(passed=1, failed=2)
    result.stdout.fnmatch_lines(
        ["*`make check` gives a file 0. Mark its long tests with pytest.mark.job, or add it to PLACES*"]
    )


def test_a_job_is_in_make_test_if_it_is_listed(check, monkeypatch):
    monkeypatch.setattr(tiers, "ONCE", {"an engine": ("test_a_job_is_in_make_test_if_it_is_listed.py::test_one",)})
    jobs = "@pytest.mark.vllm\ndef test_one(): ...\n@pytest.mark.vllm\ndef test_other(): ...\n"
    check(f"import pytest\n{jobs}def test_quick(): ...\n", "-m", tiers.MAKE_TEST).assert_outcomes(
        passed=2, deselected=1
    )


def test_what_make_test_lists_and_nobody_has_ends_it_by_name(check, monkeypatch):
    monkeypatch.setattr(tiers, "ONCE", {"an engine": ("test_renamed.py::test_it",)})
    result = check("def test_quick(): ...\n", "-m", tiers.MAKE_TEST)
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines(["*no test begins with what ONCE in tests/tiers.py says: test_renamed.py::test_it*"])


def test_the_makefile_asks_for_what_the_tiers_are():
    assert f'-m "{tiers.MAKE_TEST}"' in (ROOT / "Makefile").read_text()


def test_every_place_that_is_left_out_exists():
    for place in tiers.PLACES:
        file, _, test = place.partition("::")
        assert not test or f"def {test}" in (ROOT / file).read_text(), place
        assert (ROOT / file).exists(), place


def test_a_test_that_connects_to_ray_fails(check):
    result = check(
        "import sys, types\n"
        "def test_a(monkeypatch):\n"
        "    monkeypatch.setitem(sys.modules, 'ray', types.SimpleNamespace(is_initialized=lambda: True))\n"
    )
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["*without the marker `job`: use the fixture ray_cluster*"])


def test_the_whole_suite_has_no_budget(check):
    check(spinning("first", "second", "third"), "-m", "").assert_outcomes(passed=3)
