"""Run library calls that may never return on daemon threads, and wait for them with a deadline."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from ..errors import TransportTimeout


class Attempt:
    """Runs `work` on a daemon thread, which stays behind if `work` never ends.

    Stores and groups of a failed `work` must be freed as soon as its error is dropped. An error keeps the frames of its
    traceback alive, so no frame may refer to the error: such a cycle lives until a garbage collection, in which a
    thread of the trainer would wait for a broken group's last operation.
    """

    def __init__(self, work: Callable[[], Any]) -> None:
        self.done = threading.Event()
        self._work = work
        self._result: Any = None
        self._error: BaseException | None = None
        threading.Thread(target=self._run, name="weight-sync-connect", daemon=True).start()

    def _run(self) -> None:
        try:
            self._result = self._work()
        except BaseException as exc:  # noqa: BLE001 - raised by `result`, where it belongs
            self._error = exc
        self.done.set()
        del self

    def result(self) -> Any:
        """Return or raise the outcome of `work`. Call it once, after `done`."""
        error, self._error = self._error, None
        try:
            if error is not None:
                raise error
            return self._result
        finally:
            del error


def within(timeout_s: float, call: Callable[[], Any], what: str) -> Any:
    """Return or raise the outcome of `call`. Raises TransportTimeout, naming `what`, after `timeout_s`."""
    attempt = Attempt(call)
    if not attempt.done.wait(timeout_s):
        raise TransportTimeout(f"{what} has not ended within {timeout_s:.1f} s")
    return attempt.result()
