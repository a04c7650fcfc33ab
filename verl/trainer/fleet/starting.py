"""The start of a run: what its processes are forked from, and how long each part takes."""

from __future__ import annotations

import time
from contextlib import AbstractContextManager
from dataclasses import dataclass, field

from verl.utils.timing import SpanLog, marked_timer

NOTED_S = 0.05


@dataclass
class Starting:
    """Made where a run begins, and given on to whatever starts a part of it."""

    warm: str | None = None
    """The socket of the process that forks Ray's workers (`warm_process`); None: Ray starts them."""
    began_s: float = field(default_factory=time.perf_counter)
    seconds: dict[str, float] = field(default_factory=dict)
    """Of each part that has ended. Engines start beside others: theirs are those for which the run waited."""
    spans: SpanLog = field(default_factory=lambda: SpanLog("trainer"))
    """The same, for the run's timeline."""

    def during(self, part: str) -> AbstractContextManager[None]:
        """Time the block as `part`."""
        return marked_timer(part, self.seconds, self.spans)

    def __str__(self) -> str:
        """The duration so far, and that of each part that takes time."""
        parts = ", ".join(f"{part} {seconds:.1f}" for part, seconds in self.seconds.items() if seconds >= NOTED_S)
        return f"{time.perf_counter() - self.began_s:.1f} s ({parts})"
