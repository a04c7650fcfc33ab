"""The process that calls a reward function, for `pool`. It calls on its main thread, for libraries with signals.

It imports neither torch nor Ray, so that a replacement starts fast.
"""

from __future__ import annotations

import asyncio
import inspect
import os
import pickle
import signal
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

from verl.checkpoint_engine.support.lifetime import end_with
from verl.utils.plain import as_float, as_text, plain

SHOWN_CHARACTERS = 120
LARGEST = 3.4028234663852886e38
"""The largest float32: rewards become float32."""
GRACE_S = 10.0
"""Processor time after a sample's deadline at which the process ends itself, in case the pool that kills it is gone."""


@dataclass(frozen=True)
class Scored:
    """The function's result; `score` is finite, also as float32."""

    score: float
    others: dict[str, Any]
    """Its further values, converted by `plain`; for a single number, that number as `acc`, as in verl."""


@dataclass(frozen=True)
class Raised:
    """The function raised."""

    message: str
    pickled: bytes | None
    """The exception, if it can be pickled."""
    trace: str

    def cause(self) -> BaseException:
        """The exception, or another one with its text if it cannot be pickled."""
        try:
            error = pickle.loads(self.pickled) if self.pickled else None  # noqa: S301 - written by our own process
        except Exception:  # noqa: BLE001 - any class may be unpicklable in any way
            error = None
        if not isinstance(error, BaseException):
            error = RuntimeError(self.message)
        error.add_note(self.trace)
        return error


@dataclass(frozen=True)
class NoNumber:
    """The function did not return a finite number; `shown` is the beginning of its result."""

    shown: str


Outcome = Scored | Raised | NoNumber


def main(descriptor: int, parent: int) -> None:
    """Serve `pool` over the socket `descriptor` until it closes: a function, then lists of (position, arguments)."""
    end_with(parent)
    # That thread needs Python's lock, which a computation of huge numbers never lets go of; the kernel needs none.
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    connection = Connection(descriptor)
    try:
        timeout_s, pickled = connection.recv()
        most_cpu_s = (timeout_s + GRACE_S) * (os.cpu_count() or 1)
        try:
            function = pickle.loads(pickled)  # noqa: S301 - our own driver wrote it
        except Exception as exc:  # noqa: BLE001 - told to the driver
            connection.send(_raised(exc))
            return
        connection.send(None)
        with asyncio.Runner() as runner:
            while True:
                for position, arguments in connection.recv():
                    signal.setitimer(signal.ITIMER_PROF, most_cpu_s)
                    outcome = call(function, arguments, runner)
                    connection.send((position, outcome))
    except (EOFError, BrokenPipeError, ConnectionResetError):
        return


def call(function: Callable[..., Any], arguments: Mapping[str, Any], runner: asyncio.Runner) -> Outcome:
    """Call `function` with `arguments`; an awaitable result is awaited on the loop of `runner`."""
    try:
        result = function(**arguments)
        if inspect.isawaitable(result):
            result = runner.run(_awaited(result))
        named = result if isinstance(result, Mapping) else {"score": result}
        score = as_float(named.get("score"))
        if score is None or not abs(score) <= LARGEST:
            return NoNumber(as_text(result)[:SHOWN_CHARACTERS])
        if named is not result:
            return Scored(score, {"acc": score})
        return Scored(score, {str(name): plain(value) for name, value in named.items() if name != "score"})
    except (Exception, SystemExit) as exc:  # noqa: BLE001 - told to the driver, which names the sample
        return _raised(exc)


async def _awaited(result: Any) -> Any:
    return await result


def _raised(exc: BaseException) -> Raised:
    try:
        pickled = pickle.dumps(exc)
    except Exception:  # noqa: BLE001 - any class may be unpicklable in any way
        pickled = None
    trace = "".join(traceback.format_exception(exc))
    return Raised(f"{type(exc).__name__}: {exc}", pickled, f"in the scoring process:\n{trace}")
