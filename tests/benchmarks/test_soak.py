"""What `make soak` counts, on files and processes that are made up; the run itself takes minutes."""

import json
import random
import signal
import subprocess
import sys

import pytest

from benchmarks import soak
from benchmarks.soak import VICTIMS, Tally, account, account_parts, hit
from verl.trainer.config.loader import load_config
from verl.trainer.fleet.trainer_ranks import PARTS
from verl.trainer.main_ppo import check_ppo
from verl.utils.builtin import make_tiny_model


class Run:
    """Whatever of a run is looked at."""

    def __init__(self, directory, processes=None, records=()):
        self.directory = directory
        self.tokens = directory / "tokens"
        self._records = records
        self._processes = processes or {}

    def processes(self):
        return self._processes

    def steps(self):
        return 7

    def records(self):
        return self._records


def test_the_table_has_a_row_for_every_kind_of_fault_and_one_for_all():
    tally = Tally()
    tally.faults += [("queue, killed", 2.0), ("queue, killed", 4.0), ("rollouter, stopped", 12.0)]
    tally.faults.append(("server, killed", None))
    lines = tally.text().splitlines()
    assert [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines[2:6]] == [
        ["queue, killed", "2", "2", "3.0", "3.9"],
        ["rollouter, stopped", "1", "1", "12.0", "12.0"],
        ["server, killed", "1", "0", "", ""],
        ["all", "4", "3", "4.0", "11.2"],
    ]


def test_a_prompt_of_two_steps_and_a_sample_newer_than_its_trainer_are_counted(tmp_path):
    (tmp_path / "samples").mkdir()
    for step, uids in ((1, "aab"), (2, "bc")):
        lines = [json.dumps({"uid": uid, "versions": [3, 3, -1]}) + "\n" for uid in uids]
        (tmp_path / f"samples/{step}.jsonl").write_text("".join(lines))
    (tmp_path / "tokens").mkdir()
    (tmp_path / "tokens/7").write_bytes(bytes(12))
    (tmp_path / "tokens/8").write_bytes(bytes(4))  # of an engine that was killed
    tally = Tally(faults=[("server, killed", 2.0)] * 2)
    account(Run(tmp_path, records=[{"training/staleness/min": 1 - step} for step in (1, 2)]), tally)
    assert (tally.samples_twice, tally.staleness_below_zero) == (1, 1)
    assert "16 sampled, 10 trained on (62.5%; 3 per fault were not, or not yet)" in tally.text()


def test_recoveries_of_trainer_ranks_are_told_by_their_parts_and_steps_without_one_apart():
    tally = Tally()
    seconds = (0.1, 0.2, 0.3, 5.0, 2.0, 0.4)
    recovered = {f"recovery/{part}_s": taken for part, taken in zip(PARTS, seconds, strict=True)}
    steps = [{"timing_s/step": 1.5}, {"timing_s/step": 10.0, "recovery/step_s": 9.0, **recovered}]
    account_parts("trainer rank, killed", steps, (1.0, 10.0), tally)
    account_parts("trainer rank, killed", steps[1:] + steps[:1], (9.5, 11.0), tally)
    recoveries, undisturbed, _ = tally.text().split("\n\n")[-3:]
    assert recoveries.splitlines() == [
        (
            "trainer rank, killed: 2 recoveries, medians, seconds: unnoticed 0.75, noticed 0.10, ended 0.20, resources "
            "0.30, processes 5.00, models 2.00, state 0.40, rest 1.00, whole 9.75"
        ),
        "trainer rank, killed: without processes and models 2.50 to 3.00, median 2.75, 2 within 3",
    ]
    assert undisturbed == "an undisturbed step: 1.50"


def test_a_run_of_the_soak_is_one_that_starts(tmp_path):
    model = make_tiny_model(tmp_path / "model")
    given = [f"actor_rollout_ref.model.path={model}", f"trainer.default_local_dir={tmp_path / 'out'}", *soak.QUICK]
    assert check_ppo(load_config(given)).problems == []


def test_only_what_is_asked_for_is_hit(tmp_path):
    assert hit(Run(tmp_path, {1: "ray::Rollouter.run"}), random.Random(0), ["queue"]) is None


def test_the_seed_decides_who_is_hit_and_processes_of_other_kinds_are_left_alone(tmp_path):
    processes = [subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"]) for _ in range(2)]
    try:
        titles = {processes[0].pid: "ray::Rollouter.run", processes[1].pid: "raylet"}
        what, step = hit(Run(tmp_path, titles), random.Random(3))
        assert step == 7
        assert what == "rollouter, killed"
        assert processes[0].wait(60) == -signal.SIGKILL
        assert processes[1].poll() is None
    finally:
        for process in processes:
            process.kill()
            process.wait()


@pytest.fixture
def run(tmp_path):
    """Without its command."""
    run = object.__new__(soak.Run)
    run.directory, run.supervised, run._seen = tmp_path, True, {}
    return run


def test_the_driver_is_what_a_supervised_command_has_started(run):
    starts = "import subprocess, sys; subprocess.run([sys.executable, '-c', 'print(1, flush=True); input()'])"
    run.command = subprocess.Popen([sys.executable, "-c", starts], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    with run.command:
        run.command.stdout.readline()
        assert list(run.processes().values()) == [soak.DRIVER]
        run.supervised = False
        assert soak.DRIVER not in run.processes().values()
        run.command.stdin.close()


@pytest.mark.parametrize(
    ("code", "words", "survives"),
    [
        (1, "error: the raylet of this host (pid 7) is gone: it is", True),
        (1, "Traceback (most recent call last):", False),
        (130, "error: the raylet of this host (pid 7) is gone: it is", False),
    ],
)
def test_a_run_without_raylet_has_to_end_with_its_reason(run, tmp_path, code, words, survives):
    (tmp_path / "log").write_text(f"step 1\n{words}\n")
    run.command = subprocess.Popen([sys.executable, "-c", f"raise SystemExit({code})"])
    assert run.ends_by_itself(60.0) is survives


def test_nobody_is_hit_while_nobody_is_there(tmp_path):
    assert hit(Run(tmp_path, {1: "ray::IDLE"}), random.Random(0)) is None


@pytest.mark.parametrize("name", ["rollouter", "queue"])
def test_what_is_found_by_its_silence_is_stopped_too(name):
    assert VICTIMS[name][1]
