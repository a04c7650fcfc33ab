import subprocess
import sys
import time

import psutil
import pytest

from verl.checkpoint_engine.support.cleanup_process import CleanupProcess

NOTE = """
def main(arguments, lines):
    with open(arguments[0], "w") as note:
        note.write(" ".join(lines))
"""
OWNER = """
import sys, time
from pathlib import Path
from verl.checkpoint_engine.support.cleanup_process import CleanupProcess
cleanup = CleanupProcess(Path(sys.argv[1]), sys.argv[2])
cleanup.send("first")
cleanup.send("second")
print(cleanup.pid, flush=True)
time.sleep(100)
"""


@pytest.fixture
def program(tmp_path):
    path = tmp_path / "program.py"
    path.write_text(NOTE)
    return path


def test_the_program_runs_on_close_with_what_was_sent(program, tmp_path):
    cleanup = CleanupProcess(program, str(tmp_path / "note"))
    cleanup.send("hello")
    assert not (tmp_path / "note").exists()
    cleanup.close()
    cleanup.close()
    assert (tmp_path / "note").read_text() == "hello"


def test_the_program_runs_when_the_owner_is_killed(program, tmp_path):
    with subprocess.Popen(
        [sys.executable, "-c", OWNER, str(program), str(tmp_path / "note")], stdout=subprocess.PIPE, text=True
    ) as owner:
        process = psutil.Process(int(owner.stdout.readline()))
        owner.kill()
    process.wait(60)
    deadline = time.monotonic() + 60
    while not (tmp_path / "note").exists() and time.monotonic() < deadline:
        time.sleep(0.02)
    assert (tmp_path / "note").read_text() == "first second"
