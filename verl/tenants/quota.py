"""How many tokens an owner may train and sample."""

from __future__ import annotations

import math
import time
from collections.abc import Callable

from verl.tenants.refused import Refused

LONGEST_WAIT_S = 60
"""Clients of `tinker` take no longer one from an answer."""


class Quota:
    """So many tokens a minute of each owner; those of one minute may be saved up.

    What a request takes is counted when it is known, so an owner that has any left may send one of any size, and waits
    the longer for the next.
    """

    def __init__(self, per_minute: int | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        self._per_minute, self._clock = per_minute, clock
        self._left: dict[str, tuple[float, float]] = {}
        """By owner: tokens, below zero if it owes some, and when that was so."""

    def require(self, owner: str) -> None:
        """Raises Refused, with the time to wait, if none are left."""
        left = self._now(owner)
        if self._per_minute is not None and left <= 0:
            wait_s = min(math.ceil((1 - left) * 60 / self._per_minute), LONGEST_WAIT_S)
            raise Refused(
                f"this key has {self._per_minute} tokens a minute, and none left; send it again in {wait_s} s",
                status=429,
                after_s=wait_s,
            )

    def take(self, owner: str, tokens: int) -> None:
        if self._per_minute is not None:
            self._left[owner] = self._now(owner) - tokens, self._clock()

    def _now(self, owner: str) -> float:
        if self._per_minute is None:
            return math.inf
        left, then = self._left.get(owner, (self._per_minute, 0.0))
        return min(self._per_minute, left + (self._clock() - then) * self._per_minute / 60)
