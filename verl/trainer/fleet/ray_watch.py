"""Watches Ray's own processes, which are not restarted: without them most calls of Ray wait for ever.

The raylet starts and ends all others on its host: a run ends with the raylet of its driver. The GCS knows where all
processes are: a run goes on without it until it has to start a process.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

import psutil

LOOKS_EVERY_S = 0.5
STOPPED_S = 12.0
"""A raylet that is stopped for so long is given up. Ray itself would do it much later."""


class RayLost(RuntimeError):
    """Ray's raylet is gone, or its GCS when the run needs it."""

    def __init__(self, what: str) -> None:
        super().__init__(f"{what}; start the run again, trainer.resume_mode=auto goes on from its last checkpoint")


class RayWatch:
    """A thread of the driver, until `close`. It asks the operating system, because calls of Ray could hang."""

    def __init__(
        self,
        process: psutil.Process,
        on_lost: Callable[[str], None],
        *,
        looks_every_s: float = LOOKS_EVERY_S,
        stopped_s: float = STOPPED_S,
    ) -> None:
        """The thread calls `on_lost` once, with a text on the process's end."""
        self.process, self._on_lost = process, on_lost
        self._looks_every_s, self._stopped_s = looks_every_s, stopped_s
        self._closed = threading.Event()
        threading.Thread(target=self._watch, name="ray-watch", daemon=True).start()

    def close(self) -> None:
        """Idempotent."""
        self._closed.set()

    def _watch(self) -> None:
        ran_s = time.monotonic()
        while not self._closed.wait(self._looks_every_s):
            status = _status(self.process)
            if status is None:
                self._on_lost(gone(self.process))
                return
            if status != psutil.STATUS_STOPPED:
                ran_s = time.monotonic()
            elif time.monotonic() - ran_s >= self._stopped_s:
                self._on_lost(f"(pid {self.process.pid}) has been stopped for {self._stopped_s:g} s")
                return


def gone(process: psutil.Process) -> str:
    """What is said of one that has ended."""
    return f"(pid {process.pid}) is gone"


def raylet_of(about: Mapping[str, Any]) -> psutil.Process | None:
    """The raylet of a connection, from the result of `ray.init`; None if it is not on this host."""
    socket = about.get("raylet_socket_name")
    return _found("raylet", f"--raylet_socket_name={socket}") if socket else None


def gcs_of(about: Mapping[str, Any]) -> psutil.Process | None:
    session = about.get("session_dir")
    return _found("gcs_server", f"--session-dir={session}") if session else None


def _found(name: str, word: str) -> psutil.Process | None:
    for process in psutil.process_iter():
        try:
            if process.name() == name and word in process.cmdline():
                return process
        except psutil.Error:  # it has just ended, or is somebody else's
            continue
    return None


def _status(process: psutil.Process) -> str | None:
    """None of one that has ended, waited for or not."""
    try:
        status = process.status() if process.is_running() else psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return None
    return None if status in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD) else str(status)
