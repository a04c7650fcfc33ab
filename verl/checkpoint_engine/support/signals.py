"""Handle Ctrl-C and SIGTERM."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from types import FrameType
from typing import Any, NoReturn

ENDING = (signal.SIGINT, signal.SIGTERM)


REPEAT_S = 0.1
_why_interrupted = ""


def end_when_told() -> None:
    """Make SIGTERM, which schedulers send, end this process as Ctrl-C does: with a KeyboardInterrupt, in order.

    Python drops exceptions around a fork and in finalizers, so the KeyboardInterrupt is repeated a moment later. That
    uses the alarm of this process, which is ending anyway.
    """
    signal.signal(signal.SIGTERM, _as_ctrl_c)
    sys.unraisablehook = partial(_repeat_interrupt, sys.__unraisablehook__)


def end_within(seconds: float, end: Callable[[], NoReturn]) -> None:
    """Make a thread call `end` after this delay from the first Ctrl-C or SIGTERM, if this process still runs.

    It works even while the main thread is in a library's C code, which runs no Python handler. Called once, on the main
    thread, after `end_when_told`. Uses the wakeup file descriptor of this process.
    """
    told, tells = os.pipe()
    os.set_blocking(tells, False)
    signal.set_wakeup_fd(tells, warn_on_full_buffer=False)
    os.register_at_fork(after_in_child=lambda: signal.set_wakeup_fd(-1))  # what ends a fork does not end this process

    def wait() -> None:
        while signal.Signals(os.read(told, 1)[0]) not in ENDING:
            pass
        time.sleep(seconds)
        end()

    threading.Thread(target=wait, name="ends-within", daemon=True).start()


def interrupt_main_thread(why: str) -> None:
    """Interrupt the main thread from another thread, as Ctrl-C does. If the process ignores Ctrl-C, this works after
    `end_when_told`. Does nothing during `uninterrupted`. `why_interrupted` returns `why` from now on."""
    global _why_interrupted
    _why_interrupted = why
    ignored = signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    number = signal.SIGTERM if ignored and signal.getsignal(signal.SIGTERM) is _as_ctrl_c else signal.SIGINT
    signal.pthread_kill(threading.main_thread().ident or 0, number)


def why_interrupted() -> str:
    """Why this process has interrupted itself; empty if it has not."""
    return _why_interrupted


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
    """Ignore both signals in this block, which must be short: a second Ctrl-C would interrupt the clean-up.
    `end_within` still counts from them.

    Does nothing outside the main thread.
    """
    with _handling(lambda *_: None, ENDING):
        yield


@contextmanager
def ending_at_once(end: Callable[[], NoReturn]) -> Iterator[None]:
    """In this block, both signals call `end` at once and raise nothing, for libraries that continue after a
    KeyboardInterrupt. An ignored SIGINT stays ignored.

    `end` may run between any two instructions, even within a write to stderr. Does nothing outside the main thread.
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
