"""Processes that a benchmark measures in."""

from __future__ import annotations

import multiprocessing
import signal
import subprocess
from collections.abc import Sequence
from multiprocessing.connection import Connection
from typing import Any, Protocol

ENDS_WITHIN_S = 30.0
"""After SIGTERM; then it is killed."""
LEAVES_WITHIN_S = 10.0
"""When its pipe is closed; then it is killed."""

IMPORTS = [
    "benchmarks.node_process",
    "benchmarks.parameter_server",
    "benchmarks.peers",
    "benchmarks.raw_gloo",
    "benchmarks.raw_one_sided",
]


def fresh_processes() -> Any:
    """A context of `multiprocessing`: its processes are forked from one that has imported all they need, and no more.

    They begin in milliseconds, where one that imports torch for itself takes three seconds of processor time.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(IMPORTS)
    return context


class Program(Protocol):
    """A running one, as `subprocess.Popen` has it."""

    def send_signal(self, number: int, /) -> None: ...

    def wait(self, timeout: float | None = None) -> int: ...

    def kill(self) -> None: ...


def end_program(program: Program) -> None:
    """Ask it to end, and see to it that it has."""
    program.send_signal(signal.SIGTERM)
    try:
        program.wait(ENDS_WITHIN_S)
    except subprocess.TimeoutExpired:
        program.kill()
        program.wait()


def end_processes(pipes: Sequence[Connection], processes: Sequence[multiprocessing.process.BaseProcess]) -> None:
    """Close the pipes from which processes read what they shall do, and see to it that they have ended."""
    for pipe in pipes:
        pipe.close()
    for process in processes:
        process.join(LEAVES_WITHIN_S)
        if process.is_alive():
            process.kill()
