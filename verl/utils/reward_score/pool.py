"""Calls a reward function in processes, with a deadline for every sample.

Only the end of a process surely ends the computation of a library on a response: it may never release Python's lock,
and math-verify's time limits are signals, which only reach a main thread.
"""

from __future__ import annotations

import contextlib
import math
import os
import signal
import socket
import struct
import subprocess
import sys
import time
import weakref
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from typing import Any

from verl.utils.reward_score.process import Outcome, Raised

START_S = 120.0
"""Deadline of a process's start: it imports the user's file with its imports, which is slow on a busy machine."""
TALK_S = 30.0
"""Deadline for the rest of a message; beyond it the process counts as stopped."""
ENDING_S = 1.0
"""Deadline for the end of a process that has closed its connection."""
LOOK_S = 1.0
"""The interval between checks of the deadlines without messages."""
SAMPLES_AT_ONCE = 64
_COMMAND = """import sys
sys.path[:] = sys.argv[3:]
from verl.utils.reward_score.process import main
main(*map(int, sys.argv[1:3]))
"""


@dataclass(frozen=True)
class Abandoned:
    """The sample's process was killed or died; `why` has the reason."""

    why: str


class ScoringError(RuntimeError):
    """No scoring process can be started."""


class ScoringPool:
    """`num_workers` processes, started at first use and kept. `close` or garbage collection ends them.

    Used by one thread at a time.
    """

    def __init__(
        self, function: bytes, *, num_workers: int, timeout_s: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """`function` is pickled. `timeout_s` is the deadline of one sample, by `clock`."""
        self._function = function
        self._num_workers = num_workers
        self._timeout_s = timeout_s
        self._clock = clock
        self._workers: list[_Worker] = []
        weakref.finalize(self, _end_all, self._workers)

    def start(self) -> None:
        """Start the processes, without waiting for them."""
        while len(self._workers) < self._num_workers:
            self._workers.append(_Worker(self._function, self._timeout_s, self._clock))

    def close(self) -> None:
        """End the processes. Idempotent; the next `score` starts new ones."""
        _end_all(self._workers)

    def score(
        self, samples: Sequence[Mapping[str, Any]], given_up: Callable[[int, str], None] | None = None
    ) -> list[Outcome | Abandoned | None]:
        """The outcome of the function for each sample's keyword arguments, in order.

        A sample that takes longer than the deadline, or whose process dies, is `Abandoned`, and the process replaced.
        Calls `given_up` at once with its position and the reason; an error of `given_up` ends the scoring. Once the
        function has raised, unfinished samples have None. Raises ScoringError if no process starts.
        """
        outcomes: list[Outcome | Abandoned | None] = [None] * len(samples)
        queue = deque(_portions(len(samples), self._num_workers))
        try:
            while queue or any(worker.positions for worker in self._workers):
                self._hand_out(queue, samples)
                if self._collect(queue, outcomes, given_up or _nobody):
                    self.close()
                    break
        except BaseException:
            self.close()
            raise
        return outcomes

    def _hand_out(self, queue: deque[list[int]], samples: Sequence[Mapping[str, Any]]) -> None:
        self.start()
        for worker in list(self._workers):
            if queue and worker.ready and not worker.positions:
                try:
                    worker.give(queue[0], samples)
                except OSError:  # it has died since its last sample, which is no fault of this one
                    self._drop(worker)
                else:
                    queue.popleft()

    def _collect(
        self,
        queue: deque[list[int]],
        outcomes: list[Outcome | Abandoned | None],
        given_up: Callable[[int, str], None],
    ) -> bool:
        """Wait for the next answers, or the next deadline. Whether the function has raised."""
        waited_for = {worker.connection: worker for worker in self._workers if worker.positions or not worker.ready}
        if not waited_for:
            return False
        soonest = min(worker.deadline for worker in waited_for.values())
        answered = wait(list(waited_for), timeout=min(max(0.0, soonest - self._clock()), LOOK_S))
        for connection, worker in waited_for.items():
            why = None
            if connection in answered:
                try:
                    if worker.read(outcomes):
                        return True
                except (EOFError, OSError):
                    why = f"its process {worker.end(ENDING_S)}"
            elif self._clock() >= worker.deadline:
                why = f"it took longer than reward_model.timeout_s={self._timeout_s:g}"
            if why is not None:
                given_up(self._replace(worker, why, queue, outcomes), why)
        return False

    def _replace(
        self, worker: _Worker, why: str, queue: deque[list[int]], outcomes: list[Outcome | Abandoned | None]
    ) -> int:
        """The position of the sample that is given up."""
        self._drop(worker)
        if not worker.ready:
            late = self._clock() >= worker.deadline
            how = f"was not there within {START_S:g} s" if late else worker.end()
            raise ScoringError(f"a process that scores {how} while it started")
        position = worker.positions.popleft()
        outcomes[position] = Abandoned(why)
        if worker.positions:
            queue.appendleft(list(worker.positions))
        return position

    def _drop(self, worker: _Worker) -> None:
        worker.end()
        self._workers.remove(worker)


class _Worker:
    """One process. `positions` are those of the samples that it has and has not answered, in order."""

    def __init__(self, function: bytes, timeout_s: float, clock: Callable[[], float]) -> None:
        ours, theirs = socket.socketpair()
        seconds = struct.pack("ll", int(TALK_S), 0)
        for direction in (socket.SO_SNDTIMEO, socket.SO_RCVTIMEO):
            ours.setsockopt(socket.SOL_SOCKET, direction, seconds)
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-c", _COMMAND, str(theirs.fileno()), str(os.getpid()), *sys.path],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                start_new_session=True,  # what the function has started ends with it
            )
        self.connection = Connection(ours.detach())
        self.positions: deque[int] = deque()
        self.ready = False
        self._clock, self._timeout_s = clock, timeout_s
        self.deadline = clock() + START_S
        self._end = ""
        with contextlib.suppress(OSError):  # dead already: reading will tell
            self.connection.send((timeout_s, function))

    def give(self, positions: Sequence[int], samples: Sequence[Mapping[str, Any]]) -> None:
        """Raises OSError if the process is gone."""
        self.connection.send([(position, dict(samples[position])) for position in positions])
        self.positions.extend(positions)
        self.deadline = self._clock() + self._timeout_s

    def read(self, outcomes: list[Outcome | Abandoned | None]) -> bool:
        """Take one message. Whether the function has raised; raises EOFError or OSError if the process is gone."""
        message = self.connection.recv()
        self.deadline = self._clock() + self._timeout_s
        if not self.ready:
            if isinstance(message, Raised):
                raise ScoringError(f"the reward function cannot be loaded: {message.message}") from message.cause()
            self.ready = True
            return False
        position, outcome = message
        self.positions.remove(position)
        outcomes[position] = outcome
        return isinstance(outcome, Raised)

    def end(self, patience_s: float = 0.0) -> str:
        """Kill the process, after `patience_s` if need be, and what it has started. How it ended. Idempotent."""
        if not self._end:
            self.connection.close()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(timeout=patience_s)
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            code = self._process.wait()
            self._end = f"ended with exit code {code}" if code >= 0 else f"was killed by signal {-code}"
        return self._end


def _nobody(_position: int, _why: str) -> None:
    """Needs to know at once."""


def _end_all(workers: list[_Worker]) -> None:
    for worker in workers:
        worker.end()
    workers.clear()


def _portions(count: int, num_workers: int) -> list[list[int]]:
    """Runs of positions: long enough that talking costs little, short enough that all processes end together."""
    size = max(1, min(SAMPLES_AT_ONCE, math.ceil(count / (8 * num_workers))))
    return [list(range(start, min(start + size, count))) for start in range(0, count, size)]
