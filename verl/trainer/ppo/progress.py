"""Asks agent loops and trainer ranks for their progress, without waiting for answers."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from functools import reduce
from operator import add
from typing import Any

import ray

logger = logging.getLogger(__name__)


class Asked:
    """The progress of one phase of a step."""

    def __init__(self, ask: Callable[[], Sequence[Any]]) -> None:
        """`ask` sends the question to all actors and returns Ray references: each to a `Progress`, or None of an idle
        actor."""
        self._ask = ask
        self._asked: list[Any] = []
        self._last = ""

    def __call__(self, seconds: float) -> str:
        """The progress after `seconds` of the phase, from the last round that all actors answered; "" before the first.

        Dead actors are ignored here: other calls report their death.
        """
        try:
            if self._asked and not ray.wait(self._asked, num_returns=len(self._asked), timeout=0)[1]:
                answers = [answer for answer in ray.get(self._asked) if answer is not None]
                self._last, self._asked = reduce(add, answers).text(seconds) if answers else "", []
            if not self._asked:
                self._asked = list(self._ask())
        except Exception:
            logger.debug("nobody says how far the phase is", exc_info=True)
            self._last, self._asked = "", []
        return self._last
