"""Ctrl-C and SIGTERM: who handles them, and when they have to wait. Does nothing outside the main thread."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

ENDING = (signal.SIGINT, signal.SIGTERM)


def sigterm_as_ctrl_c() -> None:
    """A scheduler's SIGTERM ends this process as Ctrl-C does: with a KeyboardInterrupt, in order."""
    signal.signal(signal.SIGTERM, _as_ctrl_c)


def _as_ctrl_c(_signal: int, _frame: FrameType | None) -> None:
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # shells do that to what scripts run in the background
        signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.raise_signal(signal.SIGINT)


@contextmanager
def sigterm_handler_kept() -> Iterator[None]:
    """Give SIGTERM its handler back after the block, in which a library replaces it by one that calls `sys.exit`."""
    handler = signal.getsignal(signal.SIGTERM)
    try:
        yield
    except SystemExit as exc:
        raise KeyboardInterrupt from exc
    finally:
        if _in_main_thread():
            signal.signal(signal.SIGTERM, handler)


@contextmanager
def uninterrupted() -> Iterator[None]:
    """Ignore both during the block, which has to be short: people press Ctrl-C twice, and half an ending is none."""
    handlers = {number: signal.signal(number, signal.SIG_IGN) for number in ENDING} if _in_main_thread() else {}
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)


def _in_main_thread() -> bool:
    return threading.current_thread() is threading.main_thread()
