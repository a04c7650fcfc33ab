"""A real run whose processes are killed and stopped at random, again and again: what it survives, and how soon.

    make soak                                       # five minutes
    python -m benchmarks.soak --minutes 60 --seed 7 --mode hybrid trainer.save_freq=10

A fault comes some seconds after the run has completed the step that follows the one before. The seed decides whom it
hits, how, and when. A run that ends is told as not survived, and another one begins; so it does after Ray's own
processes were hit, of which a run without raylet has to end within 20 s and to say so. If the driver may be hit, runs
are `--supervised`, with a checkpoint of each step; a run whose raylet is gone then goes on, too. If agent loops may be
hit in the middle of a call of a tool, every message of the policy is one, of a tool that must not be called twice.
Whatever is given at the end overrides keys of the run, as on its command line.
"""

from __future__ import annotations

import json
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

import pandas
import psutil

from benchmarks import paying_tool
from benchmarks.command import parse
from benchmarks.counted_engine import sampled
from benchmarks.machine import describe_machine
from benchmarks.modes import MODES
from benchmarks.report import table
from verl.checkpoint_engine.support import envs
from verl.protocol import DataProto
from verl.trainer.fleet.trainer_ranks import PARTS
from verl.trainer.plain_state import unpacked
from verl.utils.builtin import make_tiny_model
from verl.utils.config import option
from verl.utils.framed import frames
from verl.utils.tracking import read_metrics

STARTS_WITHIN_S = 240.0
STEP_WITHIN_S = 180.0
"""After a fault; a run that takes longer has not survived it."""
ENDS_WITHIN_S = 30.0
BEYOND_S = 3.0
"""In which a trainer rank is to be back, beside what processes take to start and models to be built."""
MOST_WAIT_S = 3.0
"""From a completed step to the next fault."""
STOPPED = 0.15
"""Share of the faults that stop a process instead of killing it, where that is found by its silence within seconds."""
DRIVER = "driver"
CALL = "tool call"
VICTIMS = {
    DRIVER: (DRIVER, False),
    "trainer rank": (r"ray::(ActorRollo|trainer\.)", True),
    "keeper of states": ("ray::StateKeeper", False),
    "rollouter": ("ray::Rollouter", True),
    "queue": ("ray::MessageQueue", True),
    "server": ("ray::RolloutServer", False),
    "rollout node": ("ray::CheckpointEngineWorker", False),
    "agent loop": ("ray::AgentLoopWorker", False),
    CALL: ("ray::AgentLoopWorker", False),
    "raylet": (r"\S*/raylet/raylet ", True),
    "GCS": (r"\S*/gcs_server ", True),
}
"""By the titles that Ray gives them, and whether they are stopped, too."""
ENDS = re.compile(r"^error: the raylet of this host \(pid \d+\) (is gone|has been stopped)", re.MULTILINE)
"""How a run says that it cannot go on."""
SAID_WITHIN_S = 20.0
"""By a run that cannot go on."""
QUICK = (
    "trainer.device=cpu",
    "trainer.val_before_train=false",
    "trainer.n_gpus_per_node=2",
    "trainer.placement=separate",
    "trainer.total_training_steps=100000",
    "trainer.max_restarts=100000",
    "actor_rollout_ref.nccl_timeout=10",
    "actor_rollout_ref.model.external_lib=benchmarks.counted_engine",
    "actor_rollout_ref.rollout.name=counted",
    "trainer.test_freq=-1",
    "actor_rollout_ref.rollout.n=2",
    "actor_rollout_ref.rollout.max_restarts=100000",
    "actor_rollout_ref.rollout.agent.num_workers=2",
    "actor_rollout_ref.actor.ppo_mini_batch_size=4",
    "algorithm.adv_estimator=grpo",
    "data.train_batch_size=4",
    "data.val_max_samples=4",
    "data.max_prompt_length=64",
    "data.max_response_length=32",
    "checkpoint_engine.backend=gloo",
    "checkpoint_engine.deadlines.prepare_s=30",
    "checkpoint_engine.deadlines.publish_s=10",
    "checkpoint_engine.deadlines.stage_s=10",
    "checkpoint_engine.deadlines.commit_s=10",
)
GOES_ON = re.compile(r"the trainer goes on after step (\d+), from")
"""Not after a driver's death, which undoes the step whose checkpoint was being written."""
SUPERVISED = ("--supervised", "trainer.save_freq=1", "trainer.max_actor_ckpt_to_keep=1")


COLUMNS = {
    "hit": "{what}",
    "faults": "{faults}",
    "survived": "{survived}",
    "seconds to the next completed step: p50": "{p50:.1f}",
    "p95": "{p95:.1f}",
}


@dataclass(frozen=True, kw_only=True)
class Settings:
    minutes: float = option(5.0, "for which faults come", above=0)
    seed: int = option(0, "of the faults")
    only: list[str] = option(list(VICTIMS), "whom faults hit", choices=tuple(VICTIMS))
    mode: str = option("fully_async_policy", "of training", choices=tuple(MODES))
    overrides: list[str] = option([], "key=value words for the run; they come before --only")


@dataclass
class Tally:
    faults: list[tuple[str, float | None]] = field(default_factory=list)
    """What was hit, and the seconds from there to the record of the next step; None: it did not come."""
    recoveries: dict[str, list[dict[str, float]]] = field(default_factory=dict)
    """Of trainer ranks, by fault: the parts of each, and `whole`, from it to the record of the step after it."""
    step_s: list[float] = field(default_factory=list)
    """Of steps in which nothing was hit."""
    steps_lost: int = 0
    samples_twice: int = 0
    staleness_below_zero: int = 0
    sampled: int = 0
    """Tokens, by engines."""
    trained: int = 0
    """Tokens of them."""
    waiting: int = 0
    """Tokens of others that are kept when a run is ended: the next one would train on them."""
    calls: int = 0
    """Of tools."""
    calls_twice: int = 0
    other_calls: int = 0
    """In the turn of one that had begun."""
    leaks: list[str] = field(default_factory=list)

    def text(self) -> str:
        """The table of a report, and lines about recoveries and what went wrong."""
        frame = pandas.DataFrame(self.faults, columns=["what", "seconds"])
        rows = [
            {
                "what": what,
                "faults": len(seconds),
                "survived": seconds.count(),
                "p50": seconds.median() if seconds.count() else None,
                "p95": seconds.quantile(0.95) if seconds.count() else None,
            }
            for what, seconds in [*frame.groupby("what").seconds, ("all", frame.seconds)]
        ]
        wrong = (
            f"steps lost: {self.steps_lost}; prompts trained on twice: {self.samples_twice}; steps with a negative "
            f"staleness: {self.staleness_below_zero}; left behind: {len(self.leaks)} {' '.join(self.leaks)}".rstrip()
        )
        share = f"tokens: {self.sampled} sampled, {self.trained} trained on"
        if self.sampled and self.faults:
            lost = self.sampled - self.trained - self.waiting
            share += f", {self.waiting} kept at the end ({1 - lost / self.sampled:.1%} together; "
            share += f"{lost / len(self.faults):.0f} per fault were lost)"
        if self.calls:
            share += f"\ncalls of tools: {self.calls}; made twice: {self.calls_twice}; others in their place: "
            share += f"{self.other_calls}"
        return "\n\n".join([table("", COLUMNS, rows), *self._recoveries(), f"{share}\n{wrong}"])

    def _recoveries(self) -> list[str]:
        """Medians, and what is left of the whole without the processes and the models: that has a target."""
        told = []
        for what, recoveries in sorted(self.recoveries.items()):
            names = ("unnoticed", *PARTS, "rest", "whole")
            beyond = [one["whole"] - one["processes"] - one["models"] for one in recoveries]
            told.append(
                f"{what}: {len(recoveries)} recoveries, medians, seconds: "
                + ", ".join(f"{name} {median(one[name] for one in recoveries):.2f}" for name in names)
                + f"\n{what}: without processes and models {min(beyond):.2f} to {max(beyond):.2f}, median "
                f"{median(beyond):.2f}, {sum(one <= BEYOND_S for one in beyond)} within {BEYOND_S:g}"
            )
        return [*told, f"an undisturbed step: {median(self.step_s):.2f}"] if told and self.step_s else told


class Run:
    """A context manager; leaving it ends the run."""

    def __init__(self, directory: Path, mode: str, overrides: Sequence[str], kinds: Collection[str] = ()) -> None:
        """`kinds`: of processes that are to be hit."""
        self.directory, self._metrics = directory, directory / "out/metrics.jsonl"
        self.supervised = DRIVER in kinds
        self.tokens, self.calls = directory / "tokens", directory / "calls"
        supervision = SUPERVISED if self.supervised else ()
        tools = paying_tool.keys_of(self.calls) if CALL in kinds else ()
        self.tokens.mkdir(parents=True)
        model = make_tiny_model(directory / "model")
        arguments = [
            f"trainer.default_local_dir={directory / 'out'}",
            f"trainer.rollout_data_dir={directory / 'samples'}",
            f"actor_rollout_ref.model.path={model}",
            f"actor_rollout_ref.rollout.engine_kwargs.counted.directory={self.tokens}",
        ]
        with (directory / "log").open("w") as log:
            self.command = subprocess.Popen(
                [sys.executable, "-m", MODES[mode], *arguments, *QUICK, *supervision, *tools, *overrides],
                stdout=log,
                stderr=log,
                stdin=subprocess.DEVNULL,
                env=os.environ | {"OMP_NUM_THREADS": "1"},
                start_new_session=True,
            )
        self._seen: dict[int, float] = {}

    @property
    def log(self) -> str:
        return (self.directory / "log").read_text()

    def records(self, after: int = 0) -> list[dict[str, float]]:
        """Metrics of later steps."""
        found = read_metrics(self._metrics) if self._metrics.exists() else []
        return [record for record in found if int(record["step"]) > after]

    def steps(self) -> int:
        """The last that is recorded."""
        return max((int(record["step"]) for record in self.records()), default=0)

    def next_step(self, timeout_s: float) -> bool:
        """Wait for one more step. Whether it came."""
        steps, deadline = self.steps(), time.monotonic() + timeout_s
        while self.steps() <= steps:
            if self.command.poll() is not None or time.monotonic() > deadline:
                return False
            time.sleep(0.05)
        return True

    def ends_by_itself(self, timeout_s: float) -> bool:
        """Wait for that. Whether it ends in time, with its reason."""
        try:
            return self.command.wait(timeout_s) == 1 and ENDS.search(self.log) is not None
        except subprocess.TimeoutExpired:
            return False

    def processes(self) -> dict[int, str]:
        """Titles of what the command has started."""
        found = {}
        with suppress(psutil.NoSuchProcess):
            for process in psutil.Process(self.command.pid).children(recursive=True):
                with suppress(psutil.Error):  # it has just ended
                    is_driver = self.supervised and process.ppid() == self.command.pid
                    found[process.pid] = DRIVER if is_driver else " ".join(process.cmdline())
                    self._seen[process.pid] = process.create_time()
        return found

    def end(self) -> list[str]:
        """As Ctrl-C does; what is left afterwards."""
        self.processes()
        if self.command.poll() is None:
            self.command.send_signal(signal.SIGINT)
            try:
                self.command.wait(ENDS_WITHIN_S)
            except subprocess.TimeoutExpired:
                self.command.kill()
                self.command.wait()
        deadline = time.monotonic() + ENDS_WITHIN_S
        while (left := self._left()) and time.monotonic() < deadline:
            time.sleep(0.2)
        for pid in self._alive():
            psutil.Process(pid).kill()
        return left

    def _alive(self) -> list[int]:
        """Of whatever it has ever been seen to start."""
        alive = []
        for pid, created in self._seen.items():
            try:
                process = psutil.Process(pid)
                if process.create_time() == created and process.status() != psutil.STATUS_ZOMBIE:
                    alive.append(pid)
            except psutil.NoSuchProcess:
                pass
        return alive

    def _left(self) -> list[str]:
        drivers = {self.command.pid, *self._seen}
        memory = [str(path) for pid in drivers for path in envs.shm_dir().glob(f"verl-{pid}-*")]
        return [f"process {pid}" for pid in self._alive()] + memory

    def __enter__(self) -> Run:
        return self

    def __exit__(self, *_: object) -> None:
        self.end()


def _processes(run: Run, name: str, titles: Mapping[int, str]) -> list[int]:
    pids = sorted(pid for pid, command in titles.items() if re.match(VICTIMS[name][0], command))
    return [pid for pid in pids if paying_tool.is_paying(run.calls, pid)] if name == CALL else pids


def hit(run: Run, chance: random.Random, kinds: Collection[str] = VICTIMS.keys()) -> tuple[str, int] | None:
    """Kill or stop one process: which kind, and how. None if there is none at the moment."""
    titles = run.processes()
    present = {name: pids for name in VICTIMS if name in kinds and (pids := _processes(run, name, titles))}
    if not present:
        return None
    name = chance.choice(sorted(present))
    how = signal.SIGSTOP if VICTIMS[name][1] and chance.random() < STOPPED else signal.SIGKILL
    try:
        psutil.Process(chance.choice(present[name])).send_signal(how)
    except psutil.NoSuchProcess:
        return None
    return f"{name}, {'stopped' if how == signal.SIGSTOP else 'killed'}", run.steps()


def soak(run: Run, until_s: float, chance: random.Random, tally: Tally, kinds: Collection[str]) -> bool:
    """Faults until then, that hit one of `kinds`, or until one after which a run cannot start anything again. Whether
    the run did what it should.

    Without its raylet it ends, in time and with its reason; without GCS it goes on until another process dies.
    """
    if not run.next_step(STARTS_WITHIN_S):
        return False
    while time.monotonic() < until_s:
        time.sleep(chance.uniform(0.0, MOST_WAIT_S))
        if (fault := hit(run, chance, kinds)) is None:
            continue
        (what, step), began_s, told = fault, time.monotonic(), len(run.log)
        tally.faults.append((what, None))
        if what.startswith("raylet") and not run.supervised:
            if not run.ends_by_itself(SAID_WITHIN_S):
                return False
            tally.faults[-1] = what, time.monotonic() - began_s
            return True
        # The step under way may be complete without what was hit; the one after it is not.
        if not run.next_step(STEP_WITHIN_S):
            return False
        first_s = time.monotonic() - began_s
        if not run.next_step(STEP_WITHIN_S):
            return False
        seconds = time.monotonic() - began_s
        tally.faults[-1] = what, seconds
        account_parts(what, run.records(step), (first_s, seconds), tally)
        for went_on in GOES_ON.findall(run.log[told:]):
            tally.steps_lost += max(step - int(went_on), 0)
        print(f"{what}: {seconds:.1f} s", flush=True)
        if what.startswith("GCS"):
            break
    return True


def account_parts(what: str, records: Sequence[Mapping[str, float]], seconds: Sequence[float], tally: Tally) -> None:
    """Of the steps that were recorded after that fault, so many seconds after it."""
    for record, whole in zip(records, seconds, strict=False):
        if "recovery/step_s" in record:
            parts = {part: record[f"recovery/{part}_s"] for part in PARTS}
            rest = record["recovery/step_s"] - sum(parts.values())
            unnoticed = whole - record["recovery/step_s"]
            tally.recoveries.setdefault(what, []).append(parts | {"unnoticed": unnoticed, "rest": rest, "whole": whole})
        else:
            tally.step_s.append(record["timing_s/step"])


def kept(directory: Path, trained: Collection[str]) -> int:
    """Tokens of prompts with other uids, in what a run has left there for one that resumes it."""
    tokens, seen = 0, set(trained)
    for path in directory.glob("*.samples"):
        with path.open("rb") as file:
            for head, payload, _ in frames(file):
                batches = [part for part in unpacked(payload) if isinstance(part, DataProto)] if payload else []
                uids = {uid for batch in batches for uid in batch.non_tensor_batch.get("uid", ())}
                if uids.isdisjoint(seen):
                    tokens += head.get("tokens", 0)
                    seen |= uids
    for path in directory.glob("*.unfinished"):
        with path.open("rb") as file:
            for _, payload, _ in frames(file):
                for sample, _, _, _, token_ids, *_ in unpacked(payload):
                    tokens += 0 if any(uid in sample for uid in seen) else len(token_ids)
    return tokens


def account(run: Run, tally: Tally) -> None:
    """Who was trained on twice, by uid; what was newer than its trainer; tokens."""
    steps: dict[str, set[str]] = {}
    for path in (run.directory / "samples").glob("*.jsonl"):
        for line in path.read_text().splitlines():
            sample = json.loads(line)
            steps.setdefault(sample["uid"], set()).add(path.stem)
            tally.trained += sum(version >= 0 for version in sample.get("versions", ()))
    tally.sampled += sampled(run.tokens)
    tally.waiting += kept(run.directory / "out/kept_samples", steps)
    if run.calls.exists():
        for name, number in zip(("calls", "calls_twice", "other_calls"), paying_tool.payments(run.calls), strict=True):
            setattr(tally, name, getattr(tally, name) + number)
    tally.samples_twice += sum(len(of_uid) > 1 for of_uid in steps.values())
    tally.staleness_below_zero += sum(record["training/staleness/min"] < 0 for record in run.records())


def main(argv: Sequence[str] | None = None) -> int:
    """0 if every fault was survived, no step lost, nothing trained on or called twice, and nothing left behind."""
    settings, _ = parse("soak", __doc__, Settings, argv, files=None)
    chance, tally = random.Random(settings.seed), Tally()
    until_s = time.monotonic() + 60 * settings.minutes
    with tempfile.TemporaryDirectory(prefix="verl-soak-") as root:
        number = 0
        while time.monotonic() < until_s:
            number += 1
            with Run(Path(root) / str(number), settings.mode, settings.overrides, settings.only) as run:
                lives = soak(run, until_s, chance, tally, settings.only)
                tally.leaks += run.end()
                account(run, tally)
                if not lives:
                    print(f"the run ended:\n{run.log[-4000:]}", flush=True)
    machine = describe_machine()
    where = f"{machine['cores']} cores of {machine['processor']}, load average {os.getloadavg()[2]:.0f}"
    print(f"\n{where}; {settings.mode}, seed {settings.seed}, {settings.minutes:g} minutes\n")
    print(tally.text())
    survived = all(seconds is not None for _, seconds in tally.faults)
    twice = tally.samples_twice or tally.calls_twice
    wrong = tally.steps_lost or twice or tally.leaks or tally.staleness_below_zero
    return 0 if survived and not wrong else 1


if __name__ == "__main__":
    sys.exit(main())
