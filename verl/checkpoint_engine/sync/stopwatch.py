"""Measure the phases of one sync, and each member's share of them."""

from __future__ import annotations

import asyncio
import time
from collections import Counter, defaultdict
from collections.abc import Awaitable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import TypeVar

from ..plan.member_report import MemberTime, PhaseReport
from ..plan.types import PHASES

T = TypeVar("T")


class Stopwatch:
    """Seconds per phase, and per member within a phase. Phases have no gaps between them: they add up to the total."""

    def __init__(self) -> None:
        self.began_s = time.time()
        self._began = self._last = time.perf_counter()
        self._members: dict[str, dict[str, MemberTime]] = {}
        self._nbytes: defaultdict[str, Counter[str]] = defaultdict(Counter)
        self.seconds = dict.fromkeys(PHASES, 0.0)
        self.laps: list[tuple[str, float]] = []

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        try:
            yield
        finally:
            now = time.perf_counter()
            self.seconds[name] += now - self._last
            self.laps.append((name, now - self._last))
            self._last = now

    def timed(self, phase: str, calls: Mapping[str, Awaitable[T]]) -> dict[str, asyncio.Future[T]]:
        """Start `calls` of members. Each member's time runs until its call returns, fails or is cancelled."""
        start = time.perf_counter()
        running: dict[str, asyncio.Future[T]] = {name: asyncio.ensure_future(call) for name, call in calls.items()}
        for name, call in running.items():
            call.add_done_callback(partial(self._ended, phase, name, start))
        return running

    def _ended(self, phase: str, name: str, start: float, _call: object) -> None:
        of_phase = self._members.setdefault(phase, {})
        known = of_phase.get(name) or MemberTime(member=name, began_s=start - self._began, seconds=0.0)
        of_phase[name] = replace(known, seconds=known.seconds + time.perf_counter() - start)

    def moved(self, phase: str, nbytes: Mapping[str, int]) -> None:
        """Add the bytes that each member wrote or fetched in `phase`."""
        self._nbytes[phase].update(nbytes)

    @property
    def members(self) -> dict[str, PhaseReport]:
        return {
            phase: PhaseReport.of(
                replace(one, nbytes=self._nbytes[phase][one.member]) for one in self._members[phase].values()
            )
            for phase in self.seconds
            if phase in self._members
        }
