"""What is looked at, and started again, when work of a run has failed, and how often that work is tried again."""

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
"""Work that failed, and what of what it needs may have died: in this order, for each needs those before it.

What was on a machine that is gone leaves the run. All else is started again where it was.
"""

Look = Callable[[], int]
"""Find what died of one kind, and start it again or give it up: how many. Raises if the run cannot go on without."""


class RestartLimit:
    """How often something is started again: `most` times within any `window_s`."""

    def __init__(self, most: int, window_s: float, *, now_s: Callable[[], float] = time.monotonic) -> None:
        self._most, self._window_s, self._now_s = most, window_s, now_s
        self._taken: deque[float] = deque()

    def __str__(self) -> str:
        return f"trainer.max_restarts={self._most} within {self._window_s:g} s"

    def take(self) -> bool:
        """Whether it may be, now; if so it counts."""
        now_s = self._now_s()
        while self._taken and now_s - self._taken[0] >= self._window_s:
            self._taken.popleft()
        if len(self._taken) >= self._most:
            return False
        self._taken.append(now_s)
        return True


class Recovery:
    """For one run, on its driver."""

    def __init__(self, *, max_restarts: int, around: Callable[[], AbstractContextManager[None]] = nullcontext) -> None:
        """A batch that fails is generated again at most `max_restarts` times, a sync made again once.

        A step, as often as who looks after trainer ranks starts them again: `RestartLimit`. `around` every look: it may
        raise if nothing can be started.
        """
        self._around = around
        self._most: dict[str, float] = {SYNC: 1, BATCH: max_restarts, STEP: math.inf}
        self._looks: dict[str, Look] = {}
        self._found: Counter[str] = Counter()

    def watch(self, kind: str, look: Look) -> None:
        """Have `look` find what dies of `kind`."""
        self._looks[kind] = look

    def found(self, kind: str, number: int) -> None:
        """Count what has been started again or given up outside of a look of ours."""
        self._found[kind] += number

    def changes(self, work: str) -> int:
        """How much of what `work` needs has been started again or given up so far."""
        return sum(self._found[kind] for kind in set(LOOKED_AT[work]))

    def look(self, work: str) -> None:
        """Start again what died of what `work` needs. Raises what a look raises."""
        with self._around():
            for kind in LOOKED_AT[work]:
                if kind in self._looks:
                    self.found(kind, self._looks[kind]())

    def recovers(self, work: str, *, since: int, tried: int) -> bool:
        """Whether `work`, which has failed, is tried again: only if something of what it needs had died.

        `since`: `changes` when the attempt began; somebody else may have found what died since. `tried`: how often it
        has been tried again already.
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
        """What `first` returns, or `again`, which gets the failure before. Raises what the last attempt raised."""
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
