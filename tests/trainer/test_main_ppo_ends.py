"""How `main_ppo` ends when something hangs."""

import subprocess
import sys

import pytest

PROGRAM = """
import threading, time
from verl.checkpoint_engine.support.signals import interrupt_main_thread
from verl.trainer import main_ppo

main_ppo.ENDS_WITHIN_S = 0.1

def hangs(config):
    threading.Thread(target=interrupt_main_thread, args=({why!r},)).start()
    while True:
        try:
            time.sleep(60)
        except KeyboardInterrupt:
            pass

main_ppo.run(hangs, argv=["trainer.default_local_dir={directory}"])
"""


@pytest.mark.parametrize(
    ("why", "code", "says"), [("the raylet is gone", 1, "error: the raylet is gone"), ("", 130, "stopped")]
)
def test_a_driver_that_hangs_after_an_interrupt_ends_with_its_reason(tmp_path, why, code, says):
    program = PROGRAM.format(why=why, directory=tmp_path / "out")
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=300, check=False)
    assert (done.returncode, done.stderr.splitlines()[-1]) == (code, says)
