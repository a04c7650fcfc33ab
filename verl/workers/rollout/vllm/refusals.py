"""Report in one line why vLLM does not start.

Errors in the server are raised there. The engine core and workers log their errors, and the server gets a RuntimeError
that refers to a "root cause above". vLLM raises ValueError for settings that it cannot use.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from pydantic import ValidationError

from verl.utils.config import ConfigError
from verl.workers.rollout.errors import RolloutError

STREAMS = (1, 2)
"""The output descriptors of this process, which vLLM's processes inherit."""
_LOGGED = re.compile(r" ERROR [^\]]*\] (?P<type>[A-Za-z_][\w.]*(?:Error|Exception)): (?P<text>.*)$", re.MULTILINE)
_CACHE_ON_CPU = re.compile("gpu_memory_utilization|kv-cache-memory-bytes")
"""What messages about the memory of the KV cache tell people to change."""


@contextmanager
def told_in_a_line(
    name: str, device: str, more_cache: str = "actor_rollout_ref.rollout.cpu_kvcache_gib"
) -> Iterator[None]:
    """The block that starts vLLM for replica `name`. Raises ConfigError for settings that vLLM refuses, RolloutError
    with the error that a process of it logged. `more_cache`: what sets the memory of its cache on a CPU."""
    remedy = f" (on cpu: {more_cache})" if device == "cpu" else ""
    begin = {file: file.stat().st_size for file in _log_files()}
    try:
        yield
    except ValueError as exc:
        raise _refused(name, _message(exc), remedy) from exc
    except RuntimeError as exc:
        logged = next(filter(None, (_first_error(file, offset) for file, offset in begin.items())), None)
        if logged is None:
            raise RolloutError(f"{name}: vLLM did not start: {exc}") from exc
        if logged["type"] == "ValueError":
            raise _refused(name, logged["text"], remedy) from exc
        raise RolloutError(f"{name}: vLLM did not start: {logged['type']}: {logged['text']}") from exc


def _log_files() -> list[Path]:
    """Where the streams go, if that can be read again. What a worker of Ray's writes goes to files."""
    targets = {Path(f"/proc/self/fd/{stream}").resolve() for stream in STREAMS}
    return sorted(file for file in targets if file.is_file())


def _first_error(file: Path, offset: int) -> re.Match[str] | None:
    """The first that a process of vLLM logged after `offset`. Later ones are of processes that miss the first."""
    with file.open("rb") as log:
        log.seek(offset)
        return _LOGGED.search(log.read().decode(errors="replace"))


def _message(exc: ValueError) -> str:
    if isinstance(exc, ValidationError):
        return "; ".join(": ".join([*map(str, error["loc"]), error["msg"]]) for error in exc.errors())
    return str(exc)


def _refused(name: str, text: str, remedy: str) -> ConfigError:
    """`remedy`: for a cache that is too small."""
    return ConfigError(f"{name}: vLLM refuses its settings: {text}{remedy if _CACHE_ON_CPU.search(text) else ''}")
