"""The events of one rank in an update, and its first failure."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from ..errors import CheckpointEngineError, as_ours


@dataclass(frozen=True, slots=True)
class Event:
    time_s: float
    """By the host's monotonic clock, which its processes share."""
    rank: int
    kind: str
    """`fetch`, `broadcast` or `load`, with `-start` or `-end`."""
    bucket: int
    """The bucket's index in the order of all ranks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateReport:
    """The report of one rank on one update."""

    name: str
    mode: str
    """`broadcast` or `p2p`."""
    ranks: tuple[int, ...]
    """The participating ranks."""
    nbytes: int
    """Bytes of the checkpoint."""
    buckets: int
    bucket_nbytes: int
    staged: bool
    """Whether memory sufficed to fetch a bucket while another was broadcast."""
    seconds: float
    events: tuple[Event, ...]
    """The events of this rank, which fetches some of the buckets, or none."""

    @property
    def gbytes_per_s(self) -> float:
        return self.nbytes / max(self.seconds, 1e-9) / 1e9


class Events:
    """The events of one rank, recorded from several threads."""

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._events: list[Event] = []

    def record(self, kind: str, bucket: int) -> None:
        self._events.append(Event(time.monotonic(), self._rank, kind, bucket))

    def in_order(self) -> tuple[Event, ...]:
        return tuple(sorted(self._events, key=lambda event: event.time_s))


class FirstFailure:
    """The first failure of a rank's threads, or reported by another rank. It ends all work of the rank."""

    def __init__(self) -> None:
        self.error: CheckpointEngineError | None = None
        self.stop = threading.Event()
        """Set with the failure, to end reads."""
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
        """Call `action` with the error's text on the thread that sets the failure, or at once if it is set."""
        with self._lock:
            self._actions.append(action)
            error = self.error
        if error is not None:
            action(str(error))

    def forget(self) -> None:
        """Drop the error and the actions, at the end of an update.

        Later failures are ignored: their frames would keep the memory of this update.
        """
        with self._lock:
            self._over = True
            self.error = None
            self._actions.clear()

    def check(self) -> None:
        """Raises the first failure, if there is one."""
        if self.error is not None:
            raise self.error
