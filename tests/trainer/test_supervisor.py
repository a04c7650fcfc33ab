"""`--supervised`, with small programs in the place of drivers."""

import subprocess
import sys
import time

import pytest

from tests.checkpoint_engine.fakes import soon
from verl.trainer.supervisor import Supervisor
from verl.workers.config.trainer import TrainerConfig

DRIVER = """
import os, signal, sys, time
from pathlib import Path
root, script = Path(sys.argv[1]), sys.argv[2].split(",")
with (root / "log").open("a") as log:
    log.write(" ".join(sys.argv[3:]) + "\\n")
with (root / "since").open("a") as since:
    since.write(os.environ.get("VERL_SUPERVISED_SINCE", "always") + "\\n")
what, code = script[len((root / "log").read_text().splitlines()) - 1].split(":")
if what == "saves":
    (root / "latest_checkpointed_iteration.txt").write_text(str(os.getpid()))
if what == "hangs":
    time.sleep(600)
if code == "kill":
    os.kill(os.getpid(), signal.SIGKILL)
sys.exit(int(code))
"""
"""The n-th driver does the n-th of the given things, and ends with its code."""
SUPERVISOR = """
import sys
from tests.trainer.test_supervisor import supervisor
from verl.checkpoint_engine.support.signals import end_when_told
end_when_told()
try:
    supervisor(sys.argv[1], "hangs:0").run()
except KeyboardInterrupt:
    sys.exit(130)
"""


def supervisor(root, script, **config):
    config = TrainerConfig(default_local_dir=str(root), **{"save_freq": 1, **config})
    return Supervisor([sys.executable, "-c", DRIVER, str(root), script], config)


@pytest.mark.parametrize(
    ("script", "code", "drivers"),
    [
        ("saves:0", 0, [""]),
        ("-:2", 2, [""]),
        ("-:130", 130, [""]),
        ("-:kill,saves:kill,-:kill,-:0", 0, ["", "", "trainer.resume_mode=auto", "trainer.resume_mode=auto"]),
        ("-:kill,-:kill,-:kill,-:kill,-:0", 1, ["", "", "", ""]),
        ("-:1,saves:1,-:1,-:1,-:0", 1, ["", "", "trainer.resume_mode=auto", "trainer.resume_mode=auto"]),
    ],
    ids=["done", "usage", "told to end", "killed", "killed too often", "fails at the same place"],
)
def test_a_driver_that_dies_is_started_again_from_the_checkpoint_of_this_job(tmp_path, script, code, drivers):
    assert supervisor(tmp_path, script).run() == code
    assert (tmp_path / "log").read_text().splitlines() == drivers


def test_drivers_that_are_started_again_know_since_when_their_output_directory_is_their_own(tmp_path):
    before = time.time()
    supervisor(tmp_path, "-:kill,saves:kill,-:0").run()
    first, *others = (tmp_path / "since").read_text().splitlines()
    assert first == "always"
    assert len(set(others)) == 1
    assert before <= float(others[0]) <= time.time()


def test_a_checkpoint_of_an_earlier_job_is_not_resumed_from(tmp_path):
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("7")
    assert supervisor(tmp_path, "-:kill,-:0").run() == 0
    assert (tmp_path / "log").read_text().splitlines() == ["", ""]


def test_a_run_without_checkpoints_is_told_what_that_means(tmp_path, caplog):
    supervisor(tmp_path, "-:0", save_freq=-1).run()
    assert "begins again at the first step" in caplog.text


def test_who_is_told_to_end_ends_the_driver(tmp_path):
    process = subprocess.Popen([sys.executable, "-c", SUPERVISOR, str(tmp_path)])
    assert soon(lambda: (tmp_path / "log").exists())
    process.terminate()
    assert process.wait(60) == 130
