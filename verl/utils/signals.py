"""Ctrl-C and SIGTERM: who handles them, and when they are ignored. Does nothing outside the main thread."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

ENDING = (signal.SIGINT, signal.SIGTERM)


def sigterm_as_ctrl_c() -> None:
    """A scheduler's SIGTERM ends this process as Ctrl-C does: with a KeyboardInterrupt, in order."""
    signal.signal(signal.SIGTERM, _as_ctrl_c)


def _as_ctrl_c(_signal: int, _frame: FrameType | None) -> None:
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # shells do that to what scripts run in the background
        signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.raise_signal(signal.SIGINT)


@contextmanager
def uninterrupted() -> Iterator[None]:
    """Ignore both during the block, which has to be short: people press Ctrl-C twice, and half an ending is none."""
    with _handling(signal.SIG_IGN):
        yield


@contextmanager
def _handling(handler: Any) -> Iterator[None]:
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    previous = {number: signal.signal(number, handler) for number in ENDING}
    try:
        yield
    finally:
        for number, before in previous.items():
            signal.signal(number, before)
