"""Wall-clock seconds of named phases."""

from __future__ import annotations

import time
from collections.abc import Iterator, MutableMapping
from contextlib import contextmanager


@contextmanager
def marked_timer(name: str, timings: MutableMapping[str, float]) -> Iterator[None]:
    """Add the seconds of the block to `timings[name]`, also when it raises. A name may come several times in a step."""
    start = time.perf_counter()
    try:
        yield
    finally:
        timings[name] = timings.get(name, 0.0) + time.perf_counter() - start
