"""After a failure: finds and restarts dead members of a run, and limits how often the failed work is repeated."""

from __future__ import annotations

import itertools
import math
import time
from collections import Counter, deque
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import TypeVar

T = TypeVar("T")

SYNC, SERVICE, BATCH, STEP = "a sync", "serving the version", "a batch", "a training step"
MACHINES, NODES, REPLICAS, AGENT_LOOPS = "machines", "rollout nodes", "replicas", "agent loops"
TRAINER_RANKS, WEIGHTS = "trainer ranks", "weights"

LOOKED_AT = {
    # Again machines: that of a node which does not start is known to be gone when its start has failed.
    SYNC: (MACHINES, NODES, MACHINES, REPLICAS),
    # A rollout node that was started again has no weights until the next sync. If that was all of them, and all engines
    # died, too, there is nothing that could be loaded: weights that "died", which the trainer brings once more.
    SERVICE: (MACHINES, REPLICAS, WEIGHTS),
    BATCH: (MACHINES, REPLICAS, WEIGHTS, AGENT_LOOPS),
    # A step is begun again when its batch is there, and ends with its sync, which look after the rest.
    STEP: (TRAINER_RANKS,),
}
"""By kind of work: the kinds of members that it needs, to be checked in this order, as each needs those before it.

Members on a lost machine leave the run. All others are restarted where they were.
"""

Look = Callable[[], int]
"""Find dead members of one kind, restart them or give them up; returns their number. Raises if the run cannot go on."""


class RestartLimit:
    """Allows at most `most` restarts within any `window_s`."""

    def __init__(self, most: int, window_s: float, *, now_s: Callable[[], float] = time.monotonic) -> None:
        self._most, self._window_s, self._now_s = most, window_s, now_s
        self._taken: deque[float] = deque()

    def __str__(self) -> str:
        return f"trainer.max_restarts={self._most} within {self._window_s:g} s"

    def take(self) -> bool:
        """Count one restart if the limit allows it now; returns whether it does."""
        now_s = self._now_s()
        while self._taken and now_s - self._taken[0] >= self._window_s:
            self._taken.popleft()
        if len(self._taken) >= self._most:
            return False
        self._taken.append(now_s)
        return True


class Recovery:
    """Repeats failed work of one run after restarting dead members. Used on the driver."""

    def __init__(self, *, max_restarts: int, around: Callable[[], AbstractContextManager[None]] = nullcontext) -> None:
        """A batch that fails is generated again at most `max_restarts` times, a sync made again once.

        A failed step is repeated as often as trainer ranks are restarted (`RestartLimit`). `around` is entered for
        every check; it may raise if nothing can be started.
        """
        self._around = around
        self._most: dict[str, float] = {SYNC: 1, BATCH: max_restarts, STEP: math.inf}
        self._looks: dict[str, Look] = {}
        self._found: Counter[str] = Counter()

    def watch(self, kind: str, look: Look) -> None:
        """Register `look`, which finds dead members of `kind`."""
        self._looks[kind] = look

    def found(self, kind: str, number: int) -> None:
        """Count members of `kind` restarted or given up outside of `look`."""
        self._found[kind] += number

    def changes(self, work: str) -> int:
        """How many of the members that `work` needs have been restarted or given up so far."""
        return sum(self._found[kind] for kind in set(LOOKED_AT[work]))

    def look(self, work: str) -> None:
        """Restart the dead members that `work` needs. Raises the errors of the registered functions."""
        with self._around():
            for kind in LOOKED_AT[work]:
                if kind in self._looks:
                    self.found(kind, self._looks[kind]())

    def recovers(self, work: str, *, since: int, tried: int) -> bool:
        """Restart what died, and return whether to repeat the failed `work`: only if a member that it needs had died.

        `since` is `changes` at the start of the attempt: other work may have restarted the dead since. `tried` is the
        number of repetitions so far.
        """
        if tried >= self._most[work]:
            return False
        self.look(work)
        return self.changes(work) > since

    def attempt(
        self,
        work: str,
        first: Callable[[], T],
        *,
        failures: tuple[type[Exception], ...],
        again: Callable[[Exception], T],
        since: int | None = None,
    ) -> T:
        """The result of `first`, or of `again(failure)`. Raises the error of the last attempt."""
        since = self.changes(work) if since is None else since
        failure: Exception | None = None
        for tried in itertools.count():
            try:
                return first() if failure is None else again(failure)
            except failures as exc:
                if not self.recovers(work, since=since, tried=tried):
                    raise
                failure, since = exc, self.changes(work)
        raise AssertionError("an attempt returns or raises")
