"""Ctrl-C and SIGTERM: who handles them, and when they are ignored."""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from types import FrameType
from typing import Any, NoReturn

ENDING = (signal.SIGINT, signal.SIGTERM)


REPEAT_S = 0.1


def end_when_told() -> None:
    """A scheduler's SIGTERM ends this process as Ctrl-C does: with a KeyboardInterrupt, in order.

    Python ignores what is raised around a fork and in finalizers. A KeyboardInterrupt there would be lost: it is
    repeated a moment later. That takes the alarm clock of this process, which is to end anyway.
    """
    signal.signal(signal.SIGTERM, _as_ctrl_c)
    sys.unraisablehook = partial(_repeat_interrupt, sys.__unraisablehook__)


def _as_ctrl_c(_signal: int, _frame: FrameType | None) -> None:
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # shells do that to what scripts run in the background
        signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.raise_signal(signal.SIGINT)


def _repeat_interrupt(report: Callable[[Any], None], ignored: Any) -> None:
    if issubclass(ignored.exc_type, KeyboardInterrupt):
        signal.signal(signal.SIGALRM, lambda *_: signal.raise_signal(signal.SIGINT))
        signal.setitimer(signal.ITIMER_REAL, REPEAT_S)
    else:
        report(ignored)


@contextmanager
def uninterrupted() -> Iterator[None]:
    """Ignore both during the block, which has to be short: people press Ctrl-C twice, and half an ending is none.

    Does nothing outside the main thread.
    """
    with _handling(signal.SIG_IGN, ENDING):
        yield


@contextmanager
def ending_at_once(end: Callable[[], NoReturn]) -> Iterator[None]:
    """Both call `end` in the block, wherever the main thread is, and raise nothing: for libraries that go on after a
    KeyboardInterrupt. An ignored SIGINT stays ignored.

    `end` is called between any two instructions, also in the middle of a write to stderr. Does nothing outside the main
    thread.
    """

    def handle(_signal: int, _frame: FrameType | None) -> None:
        for number in ENDING:
            signal.signal(number, signal.SIG_IGN)
        end()

    ignored = signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    with _handling(handle, ENDING[1:] if ignored else ENDING):
        yield


@contextmanager
def _handling(handler: Any, numbers: Iterable[signal.Signals]) -> Iterator[None]:
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    previous = {number: signal.signal(number, handler) for number in numbers}
    try:
        yield
    finally:
        for number, before in previous.items():
            signal.signal(number, before)
