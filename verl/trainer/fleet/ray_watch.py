"""Whether Ray's own processes live, which nobody starts again: without them its calls wait, most of them for ever.

The raylet starts and ends all others on its host: a run ends with that of its driver. The GCS knows who is where: a run
goes on without it until something has to be started.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

import psutil

LOOKS_EVERY_S = 0.5
STOPPED_S = 12.0
"""A raylet that does not run for so long is given up. Others of its cluster would do it, much later."""


class RayLost(RuntimeError):
    """The run's Ray is gone, or what of it a run needs to go on."""

    def __init__(self, what: str) -> None:
        super().__init__(f"{what}; start the run again, trainer.resume_mode=auto goes on from its last checkpoint")


class RayWatch:
    """A thread of the driver, until `close`. It asks the operating system and not Ray, whose answers are what hangs."""

    def __init__(
        self,
        process: psutil.Process,
        on_lost: Callable[[str], None],
        *,
        looks_every_s: float = LOOKS_EVERY_S,
        stopped_s: float = STOPPED_S,
    ) -> None:
        """`on_lost` is called once, by that thread, with what has become of the process."""
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
                self._on_lost(f"(pid {self.process.pid}) is gone")
                return
            if status != psutil.STATUS_STOPPED:
                ran_s = time.monotonic()
            elif time.monotonic() - ran_s >= self._stopped_s:
                self._on_lost(f"(pid {self.process.pid}) has been stopped for {self._stopped_s:g} s")
                return


def raylet_of(about: Mapping[str, Any]) -> psutil.Process | None:
    """The raylet of a connection, by what `ray.init` says of that; None if it is not on this host."""
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
