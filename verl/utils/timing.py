"""Wall-clock seconds of named phases, and spans of what each role did when."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, MutableMapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from verl.checkpoint_engine.support import records

logger = logging.getLogger(__name__)

TIMELINE_FILE = "timeline.jsonl"
MOST_SPANS = 100_000
"""The most spans that a process keeps until they are taken; it drops the oldest first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """An activity of `role` from `start_s` to `stop_s`, in seconds since the epoch by its own machine's clock."""

    role: str
    """`trainer`, `sync`, or the name of a replica."""
    name: str
    start_s: float
    stop_s: float
    version: int | None = None
    """The version of the weights, or the training step that makes it."""


class SpanLog:
    """Records the spans of one role until `take`. Not thread-safe."""

    def __init__(self, role: str) -> None:
        self._role = role
        self._spans: deque[Span] = deque(maxlen=MOST_SPANS)
        self._open: dict[str, tuple[float, int | None]] = {}
        self._depth: dict[str, int] = {}

    def begin(self, name: str, version: int | None = None) -> None:
        """Begin the span `name`. Does nothing if it has begun already. `version`: if it is known before the end."""
        self._open.setdefault(name, (time.time(), version))

    def end(self, name: str, version: int | None = None) -> None:
        """End the span `name`. Does nothing if it has not begun. `version`: unless `begin` was given one."""
        if name in self._open:
            start_s, known = self._open.pop(name)
            self.add(name, start_s, time.time(), version if known is None else known)

    def add(self, name: str, start_s: float, stop_s: float, version: int | None = None) -> None:
        self._spans.append(Span(role=self._role, name=name, start_s=start_s, stop_s=stop_s, version=version))

    @contextmanager
    def during(self, name: str) -> Iterator[None]:
        """Record the block as a span, also when it raises. Overlapping blocks of one name are one span."""
        self._depth[name] = self._depth.get(name, 0) + 1
        self.begin(name)
        try:
            yield
        finally:
            self._depth[name] -= 1
            if not self._depth[name]:
                self.end(name)

    def take(self) -> list[Span]:
        """The spans since the last call. A running span is cut here; the next call returns the rest."""
        for name, (_, version) in list(self._open.items()):
            self.end(name)
            self.begin(name, version)
        spans = list(self._spans)
        self._spans.clear()
        return spans


class Patience:
    """Shows the running phase of a step and its progress, and logs a phase that takes much longer than before. Used by
    one thread.

    Slow and hanging phases look the same from outside; a deadline ends a hanging one, many minutes later.
    """

    def __init__(
        self,
        least_s: float = 60.0,
        times: float = 2.0,
        *,
        show: Callable[[str], None] = lambda _: None,
        progress: Mapping[str, Callable[[], Callable[[float], str]]] | None = None,
        looks_every_s: float = 1.0,
    ) -> None:
        """Logs after `least_s`, but not before `times` the longest duration so far, and whenever that time doubles.

        `show` gets a line at every change. `progress` has, by phase, a factory of functions that return the progress
        after given seconds; another thread calls them, and they must not wait.
        """
        self._least_s, self._times = least_s, times
        self._show, self._progress, self._looks_every_s = show, dict(progress or {}), looks_every_s
        self._longest_s: dict[str, float] = {}

    @contextmanager
    def during(self, name: str, what: str) -> Iterator[None]:
        """Watch the block, a phase called `name`; `what` is its name for people."""
        longest_s = self._longest_s.get(name)
        before = "" if longest_s is None else f", at most {longest_s:.1f} s before"
        progress = self._progress[name]() if name in self._progress else lambda _: ""
        ended = threading.Event()
        start = time.perf_counter()

        def tell() -> None:
            told_s = max(self._least_s, self._times * (longest_s or 0.0))
            while not ended.wait(min(self._looks_every_s, max(told_s - (time.perf_counter() - start), 0.0))):
                passed_s = time.perf_counter() - start
                so_far = progress(passed_s)
                self._show(f"{name} {so_far}".rstrip())
                if passed_s >= told_s:
                    logger.info("%s has taken %.0f s so far%s%s", what, told_s, before, so_far and f": {so_far}")
                    told_s *= 2

        self._show(name)
        thread = threading.Thread(target=tell, name="patience", daemon=True)
        thread.start()
        try:
            yield
        finally:
            ended.set()
            thread.join()
            self._longest_s[name] = max(longest_s or 0.0, time.perf_counter() - start)


@contextmanager
def marked_timer(
    name: str, timings: MutableMapping[str, float], log: SpanLog | None = None, version: int | None = None
) -> Iterator[None]:
    """Add the seconds of the block to `timings[name]`, also when it raises. A name may come several times in a step.

    Adds the block to `log` as a span.
    """
    began_s, start = time.time(), time.perf_counter()
    try:
        yield
    finally:
        seconds = time.perf_counter() - start
        timings[name] = timings.get(name, 0.0) + seconds
        if log is not None:
            log.add(name, began_s, began_s + seconds, version)


def write_spans(path: Path, spans: Iterable[Span]) -> None:
    """Append `spans` to a timeline, one JSON object per line."""
    records.append(path, [records.encoded(asdict(span)) for span in spans])


def go_back(path: Path, step: int, again: Collection[str]) -> None:
    """Before the first span of a run that continues after `step`, remove from its timeline what it will repeat.

    These are all later steps, the sync of version `step`, and the trainer's phases `again`. The complete old file stays
    beside it, as with `records.carry_over`.
    """
    try:
        spans = read_spans(path)
    except (FileNotFoundError, ValueError):
        spans = []
    end_s = max((span.stop_s for span in spans if span.role == "trainer" and _is_before(span, step, ())), default=0.0)

    def is_kept(record: dict[str, Any]) -> bool:
        span = Span(**record)
        return span.start_s < end_s if span.version is None else _is_before(span, step, again)

    records.carry_over(path, is_kept if spans else lambda _: False)


def _is_before(span: Span, step: int, again: Collection[str]) -> bool:
    """Whether it was over when a run went on after `step`, and is not among what that did `again`."""
    if span.version is None or span.version < step:
        return span.version is not None
    return span.version == step > 0 and span.role == "trainer" and span.name not in again


def read_spans(path: Path) -> list[Span]:
    """A timeline in file order; omits an incomplete last line after a kill.

    Raises FileNotFoundError, and ValueError naming the line for anything else that is not a span.
    """
    spans = []
    for number, record in enumerate(records.read(path)[0], start=1):
        try:
            spans.append(Span(**record))
        except TypeError as exc:
            raise ValueError(f"{path}, line {number}: not a span of a timeline: {str(record)[:80]!r}") from exc
    return spans
