"""What one rank of an update did when, and what went wrong first."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from ..errors import CheckpointEngineError, as_ours


@dataclass(frozen=True, slots=True)
class Event:
    time_s: float
    """Of the host's monotonic clock: comparable between its processes."""
    rank: int
    kind: str
    """`fetch`, `broadcast` or `load`, with `-start` or `-end`."""
    bucket: int
    """Its place in the order in which all ranks take them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateReport:
    """What one rank did in one update."""

    name: str
    mode: str
    """`broadcast` or `p2p`."""
    ranks: tuple[int, ...]
    """Those that took part."""
    nbytes: int
    """Of the checkpoint."""
    buckets: int
    bucket_nbytes: int
    staged: bool
    """False: too little memory to fetch a bucket while another one is broadcast."""
    seconds: float
    events: tuple[Event, ...]
    """Of this rank. It fetches some of the buckets, or none."""

    @property
    def gbytes_per_s(self) -> float:
        return self.nbytes / max(self.seconds, 1e-9) / 1e9


class Events:
    """Recorded from several threads."""

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._events: list[Event] = []

    def record(self, kind: str, bucket: int) -> None:
        self._events.append(Event(time.monotonic(), self._rank, kind, bucket))

    def in_order(self) -> tuple[Event, ...]:
        return tuple(sorted(self._events, key=lambda event: event.time_s))


class FirstFailure:
    """The first of the failures that a rank's threads run into, or hear of, ends everything that the rank does."""

    def __init__(self) -> None:
        self.error: CheckpointEngineError | None = None
        self.stop = threading.Event()
        """Ends reads: when it is set, nothing that is read is of use any more."""
        self._actions: list[Callable[[str], None]] = []
        self._over = False
        self._lock = threading.Lock()

    def set(self, error: BaseException) -> None:
        with self._lock:
            if self.error is not None or self._over:
                return
            self.error = as_ours(error)
            self.stop.set()
            actions = list(self._actions)
        for action in actions:
            action(str(self.error))

    def then(self, action: Callable[[str], None]) -> None:
        """Call `action` with the error's text when there is one, from the thread that has it."""
        with self._lock:
            self._actions.append(action)
            error = self.error
        if error is not None:
            action(str(error))

    def forget(self) -> None:
        """Let go of the error and of what was to be done about it, when all is over.

        A thread that fails later is not heard: its error would keep its frames, and they the memory of this update.
        """
        with self._lock:
            self._over = True
            self.error = None
            self._actions.clear()

    def check(self) -> None:
        """Raises the first failure, if there is one."""
        if self.error is not None:
            raise self.error
