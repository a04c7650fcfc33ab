"""Library calls that may never return, on threads that nobody waits for any longer then."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from ..errors import TransportTimeout


class Attempt:
    """Work on a daemon thread, which is left behind if it never ends.

    What the work had (stores, groups) goes as soon as its error is dropped. An error keeps all that its traceback's
    frames have, and that must not be the error again: whenever Python's collector came, a thread of the trainer would
    then wait for a broken group's last operation.
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
        """Once, when it is done."""
        error, self._error = self._error, None
        try:
            if error is not None:
                raise error
            return self._result
        finally:
            del error


def within(timeout_s: float, call: Callable[[], Any], what: str) -> Any:
    """What `call` returns or raises. Raises TransportTimeout that says `what` has not ended."""
    attempt = Attempt(call)
    if not attempt.done.wait(timeout_s):
        raise TransportTimeout(f"{what} has not ended within {timeout_s:.1f} s")
    return attempt.result()
