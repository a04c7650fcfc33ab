"""Asks agent loops and trainer ranks how far they are, and waits for none of them."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from functools import reduce
from operator import add
from typing import Any

import ray

logger = logging.getLogger(__name__)


class Asked:
    """Of one phase of a step, as it goes on."""

    def __init__(self, ask: Callable[[], Sequence[Any]]) -> None:
        """`ask` sends the question to all, and returns Ray's references to their answers: each a `Progress`, or None
        of one who has nothing to do."""
        self._ask = ask
        self._asked: list[Any] = []
        self._last = ""

    def __call__(self, seconds: float) -> str:
        """How far the phase is after so many `seconds`, by the last time that all had answered; empty before.

        A dead one answers never, or with its death, of which others tell.
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
