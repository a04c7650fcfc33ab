import subprocess
import sys
import time

import psutil

from verl.checkpoint_engine.support.cleanup_process import CleanupProcess

NOTE = "open(sys.argv[1], 'w').write(' '.join(lines))"
OWNER = f"""
import sys, time
from verl.checkpoint_engine.support.cleanup_process import CleanupProcess
cleanup = CleanupProcess({NOTE!r}, sys.argv[1])
cleanup.send("first")
cleanup.send("second")
print(cleanup.pid, flush=True)
time.sleep(100)
"""


def test_the_script_runs_on_close_with_what_was_sent(tmp_path):
    cleanup = CleanupProcess(NOTE, str(tmp_path / "note"))
    cleanup.send("hello")
    assert not (tmp_path / "note").exists()
    cleanup.close()
    cleanup.close()
    assert (tmp_path / "note").read_text() == "hello"


def test_the_script_runs_when_the_owner_is_killed(tmp_path):
    with subprocess.Popen(
        [sys.executable, "-c", OWNER, str(tmp_path / "note")], stdout=subprocess.PIPE, text=True
    ) as owner:
        process = psutil.Process(int(owner.stdout.readline()))
        owner.kill()
    process.wait(60)
    deadline = time.monotonic() + 60
    while not (tmp_path / "note").exists() and time.monotonic() < deadline:
        time.sleep(0.02)
    assert (tmp_path / "note").read_text() == "first second"
