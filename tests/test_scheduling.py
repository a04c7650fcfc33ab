"""What becomes of the other tests if one ends its process."""

import sys
from pathlib import Path

import pytest

PASS = "def test_one(): ...\ndef test_other(): ...\n"
WAIT = """
import os, time
from pathlib import Path

def wait_for(name):
    while not Path(name).exists():
        time.sleep(0.01)
"""
END = "def test_before(): ...\ndef test_ends(): os._exit(1)\ndef test_after(): ...\n"
AT_ONCE = {"test_b": PASS, "test_c": "import os\n" + END, "test_d": PASS, "test_e": "def test_last(): ..."}
AS_THE_LAST = AT_ONCE | {
    "test_b": WAIT + "def test_one(): ...\ndef test_other(): wait_for('ends')\n",
    "test_c": WAIT + END.replace("os._exit(1)", "Path('ends').touch(), wait_for('done'), os._exit(1)"),
    "test_d": WAIT + "def test_one(): ...\ndef test_other(): Path('done').touch()\n",
}
"""When the other process has nothing left: the one in its place gets one test of a file, and then another file."""


@pytest.mark.parametrize("files", [AT_ONCE, AS_THE_LAST], ids=["at once", "as the last"])
def test_a_test_that_ends_its_process_fails_alone_and_nothing_waits_for_it(pytester, monkeypatch, files):
    monkeypatch.delenv("PYTEST_XDIST_WORKER", raising=False)
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[1]))
    pytester.makepyfile(test_a=PASS, **files)
    options = ["-p", "xdist", "-p", "tests.scheduling", "--numprocesses", "2", "--dist", "loadfile"]
    result = pytester.run(sys.executable, "-m", "pytest", *options, "--no-loadscope-reorder", timeout=300)
    result.assert_outcomes(passed=9, failed=1)
    result.stdout.fnmatch_lines(["*crashed while running 'test_c.py::test_ends'*"])
