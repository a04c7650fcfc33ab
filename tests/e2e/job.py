"""`python -m verl.trainer.main_ppo`, and its like, as a user runs them, watched from outside."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

import psutil

from tests import warm_workers
from tests.processes import is_alive
from verl.checkpoint_engine.support import envs
from verl.trainer.config.loader import load_config
from verl.trainer.config.validate import validate
from verl.trainer.ppo.ray_trainer import RayPPOTrainer, TrainingResult
from verl.trainer.ppo.run import train
from verl.utils.tracking import read_metrics

T = TypeVar("T")

PR_SET_CHILD_SUBREAPER = 36
STARTUP_S = 600.0
"""Long enough for a machine that does twenty other things."""

QUICK = (
    "trainer.device=cpu",
    "trainer.val_before_train=false",
    "actor_rollout_ref.rollout.name=hf",
    "actor_rollout_ref.rollout.n=2",
    "algorithm.adv_estimator=grpo",
    "actor_rollout_ref.actor.ppo_mini_batch_size=4",
    "data.train_batch_size=4",
    "data.train_max_samples=16",
    "data.val_files=builtin:arithmetic",
    "data.val_max_samples=4",
    "data.max_prompt_length=64",
    "data.max_response_length=4",
)
"""Seconds instead of minutes. Overrides may follow that change it again."""


class Job:
    """One run in a session of its own. While it is watched, whatever it orphans becomes this process's child, so that
    `processes` sees everything that the run ever started. A context manager; leaving it ends what is left."""

    def __init__(
        self,
        directory: Path,
        *overrides: str,
        module: str = "verl.trainer.main_ppo",
        warm: warm_workers.WarmWorkers | None = None,
    ) -> None:
        """`warm` forks driver and workers: much sooner, but they are no descendants of this process."""
        directory.mkdir(parents=True, exist_ok=True)
        self.directory = directory
        self.output_dir = directory / "out"
        self._stdout, self._stderr = directory / "stdout", directory / "stderr"
        self._parents = [psutil.Process(), *([psutil.Process(warm.pid)] if warm else [])]
        self._strangers = {child.pid for parent in self._parents for child in parent.children()}
        _adopt_orphans(True)
        self._began_s = time.monotonic()
        arguments = [f"trainer.default_local_dir={self.output_dir}", *overrides]
        environment = os.environ | {"OMP_NUM_THREADS": "1"}
        self.driver: warm_workers.Fork | subprocess.Popen[bytes]
        with self._stdout.open("w") as stdout, self._stderr.open("w") as stderr:
            if warm is not None:
                environment |= warm_workers.ENVIRONMENT
                arguments.insert(0, warm.override)
                self.driver = warm_workers.Fork(warm, module, arguments, env=environment, stdout=stdout, stderr=stderr)
            else:
                self.driver = subprocess.Popen(
                    [sys.executable, "-m", module, *arguments],
                    stdout=stdout,
                    stderr=stderr,
                    stdin=subprocess.DEVNULL,
                    env=environment,
                    start_new_session=True,
                )

    @property
    def stdout(self) -> str:
        return self._stdout.read_text()

    @property
    def stderr(self) -> str:
        return self._stderr.read_text()

    @property
    def age_s(self) -> float:
        """How long ago it was started. What takes a part of that on a machine takes it on a busy one, too."""
        return time.monotonic() - self._began_s

    def processes(self) -> list[psutil.Process]:
        """What is alive of the run: the driver, its descendants, and theirs that outlived their parents."""
        found = []
        for child in (child for parent in self._parents for child in parent.children()):
            if child.pid not in self._strangers:
                with contextlib.suppress(psutil.NoSuchProcess):
                    found += [child, *child.children(recursive=True)]
        return [process for process in found if is_alive(process)]

    def find(self, *titles: str) -> list[psutil.Process]:
        """Processes whose name (15 characters) or command line contains any of `titles`.

        Ray calls an actor `ray::<Class>`, or what it does.
        """
        found = []
        for process in self.processes():
            with contextlib.suppress(psutil.NoSuchProcess):
                command = " ".join([process.name(), *process.cmdline()])
                if any(title in command for title in titles):
                    found.append(process)
        return found

    def wait_for(self, condition: Callable[[], T], what: str, timeout_s: float = STARTUP_S) -> T:
        """What `condition` has found: a second look may come too late."""
        deadline = time.monotonic() + timeout_s
        while not (found := condition()):
            assert self.driver.poll() is None, f"the run ended before {what}:\n{self.stdout}\n{self.stderr}"
            assert time.monotonic() < deadline, f"no {what} within {timeout_s} s:\n{self.stdout}\n{self.stderr}"
            time.sleep(0.05)
        return found

    def wait_for_line(self, text: str) -> None:
        self.wait_for(lambda: text in self.stderr or text in self.stdout, repr(text))

    def wait_for_checkpoint(self, step: int) -> None:
        """Until the checkpoint of `step` is there, and its metrics, which come next."""
        pointer = self.output_dir / "latest_checkpointed_iteration.txt"
        self.wait_for(lambda: pointer.exists() and int(pointer.read_text()) >= step, f"checkpoint {step}")
        self.wait_for_metrics(step)

    def wait_for_metrics(self, step: int) -> None:
        metrics = self.output_dir / "metrics.jsonl"
        self.wait_for(
            lambda: metrics.exists() and any(record["step"] == step for record in read_metrics(metrics)),
            f"metrics of step {step}",
        )

    def wait(self, timeout_s: float = STARTUP_S) -> int:
        """The exit code."""
        try:
            return self.driver.wait(timeout_s)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"not done within {timeout_s} s:\n{self.stdout}\n{self.stderr}") from None

    def left(self, timeout_s: float = 60.0) -> list[str]:
        """Processes and shared memory that are still there `timeout_s` after the driver has ended."""
        assert self.driver.poll() is not None
        deadline = time.monotonic() + timeout_s
        while True:
            left = [_title(process) for process in self.processes()]
            left += [str(path) for path in envs.shm_dir().glob(f"verl-{self.driver.pid}-*")]
            if not left or time.monotonic() > deadline:
                return left
            time.sleep(0.05)

    def __enter__(self) -> Job:
        return self

    def __exit__(self, *_: object) -> None:
        self.driver.kill()
        self.driver.wait()  # before what is left: of a fork, whoever tells how it ended
        for process in self.processes():
            with contextlib.suppress(psutil.NoSuchProcess):
                process.send_signal(signal.SIGKILL)
        _adopt_orphans(False)
        for process in psutil.Process().children():
            if process.pid not in self._strangers:
                with contextlib.suppress(ChildProcessError):
                    os.waitpid(process.pid, 0)


def _adopt_orphans(wanted: bool) -> None:
    if ctypes.CDLL(None, use_errno=True).prctl(PR_SET_CHILD_SUBREAPER, int(wanted), 0, 0, 0):
        raise OSError(ctypes.get_errno(), "prctl")


def _title(process: psutil.Process) -> str:
    try:
        return f"{process.pid} {' '.join(process.cmdline())[:120]}"
    except psutil.NoSuchProcess:
        return f"{process.pid} (ended)"


@contextlib.contextmanager
def within(seconds: float, what: str) -> Iterator[None]:
    began = time.monotonic()
    yield
    took = time.monotonic() - began
    assert took <= seconds, f"{what} took {took:.1f} s, not {seconds} s"


def in_process(
    directory: Path, *overrides: str, trainer_class: type[RayPPOTrainer] = RayPPOTrainer, **where: object
) -> TrainingResult:
    """A quick run with this process as its driver, on the Ray that it is connected to. `where`: as in `load_config`."""
    config = load_config([*QUICK, f"trainer.default_local_dir={directory / 'out'}", *overrides], **where)
    validate(config)
    return train(config, trainer_class)
