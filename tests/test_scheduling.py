"""What becomes of the other tests if one ends its process."""

import sys
from pathlib import Path


def test_a_test_that_ends_its_process_fails_alone_and_nothing_waits_for_it(pytester, monkeypatch):
    monkeypatch.delenv("PYTEST_XDIST_WORKER", raising=False)
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[1]))
    passes = "def test_one(): ...\ndef test_other(): ...\n"
    ends = "import os\ndef test_before(): ...\ndef test_ends(): os._exit(1)\ndef test_after(): ...\n"
    pytester.makepyfile(test_a=passes, test_b=passes, test_c=ends, test_d=passes, test_e="def test_last(): ...")
    options = ["-p", "xdist", "-p", "tests.scheduling", "--numprocesses", "2", "--dist", "loadfile"]
    result = pytester.run(sys.executable, "-m", "pytest", *options, "--no-loadscope-reorder", timeout=300)
    result.assert_outcomes(passed=9, failed=1)
    result.stdout.fnmatch_lines(["*crashed while running 'test_c.py::test_ends'*"])
