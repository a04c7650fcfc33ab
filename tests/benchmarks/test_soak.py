"""What `make soak` counts, on files and processes that are made up; the run itself takes minutes."""

import json
import os
import random
import signal
import subprocess
import sys

import numpy as np
import pytest
import torch

from benchmarks import paying_tool, soak
from benchmarks.soak import VICTIMS, Tally, account, account_parts, hit
from tests.experimental.agent_loop.scripted_server import said
from tests.experimental.agent_loop.test_kept_unfinished import call, written
from verl.experimental.agent_loop.tools import AgentData
from verl.protocol import DataProto
from verl.trainer.config.loader import load_config
from verl.trainer.fleet.trainer_ranks import PARTS
from verl.trainer.kept_samples import KeptSamples
from verl.trainer.main_ppo import check_ppo
from verl.utils.builtin import make_tiny_model
from verl.utils.builtin.tokenizer import build_tokenizer


class Run:
    """Whatever of a run is looked at."""

    def __init__(self, directory, processes=None, records=()):
        self.directory = directory
        self.tokens, self.calls = directory / "tokens", directory / "calls"
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
    assert "16 sampled, 10 trained on, 0 kept at the end (62.5% together; 3 per fault were lost)" in tally.text()


async def test_what_a_run_has_left_for_the_next_one_is_not_lost(tmp_path):
    kept = KeptSamples(tmp_path, {})
    for uid, tokens in (("a", 2), ("b", 3), ("b", 3)):
        tensors = {"response_mask": torch.ones(1, tokens)}
        batch = DataProto.from_dict(tensors, {"uid": np.array([uid], dtype=object)})
        kept.append(3, (0, batch, 0.1, None), batch)
    unfinished = [(str((uid, 0)), call("first", said([1] * 5, version=1))) for uid in "abc"]
    await written(kept.directory, *unfinished)
    assert soak.kept(kept.directory, {"a"}) == 3 + 5
    assert soak.kept(tmp_path / "none", {}) == 0


def test_a_call_that_is_made_twice_and_another_one_in_its_place_are_counted(tmp_path):
    run = Run(tmp_path)
    for directory in (tmp_path / "samples", run.tokens, run.calls):
        directory.mkdir()
    (run.calls / "7").write_text("begun a one 0\nended a one 0\nbegun b one 1\nbegun c two 0\n")
    (run.calls / "8").write_text("begun b one 1\nended b one 1\nbegun d two 0\n")
    assert [paying_tool.is_paying(run.calls, pid) for pid in (7, 8, 9)] == [True, True, False]
    tally = Tally()
    account(run, tally)
    assert "calls of tools: 5; made twice: 1; others in their place: 1" in tally.text()


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


@pytest.mark.parametrize("with_tools", [False, True])
def test_a_run_of_the_soak_is_one_that_starts(tmp_path, with_tools):
    model = make_tiny_model(tmp_path / "model")
    given = [f"actor_rollout_ref.model.path={model}", f"trainer.default_local_dir={tmp_path / 'out'}", *soak.QUICK]
    tools = paying_tool.keys_of(tmp_path / "calls") if with_tools else ()
    assert check_ppo(load_config([*given, *tools])).problems == []


async def test_every_message_is_a_call_of_the_paying_tool_which_writes_it_down(tmp_path):
    tokenizer = build_tokenizer()
    parser = paying_tool.EveryMessageParser(tokenizer)
    tool = paying_tool.PayingTool({"directory": str(tmp_path), "most_s": 0.0})
    (call,) = await parser.calls([1, 2, 3], [tool.schema])
    assert (call.name, call.error) == (tool.name, None)
    assert 0 < len(parser.stop_token_ids) < len(tokenizer) / 10
    sample = AgentData("one", idempotency_key="a")
    for _ in range(2):
        assert await tool.answer(call.arguments, sample) == "paid"
        assert "was interrupted" in await tool.outcome_of(call.arguments, sample)
    assert len(sample.tool_rewards) == 4
    assert not paying_tool.is_paying(tmp_path, os.getpid())
    assert paying_tool.payments(tmp_path) == (2, 0, 0)


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
