"""Which worker of an engine died: vLLM's engine core logs that, and tells its client that something has failed."""

from __future__ import annotations

import json
import logging
import signal
from collections.abc import Mapping
from pathlib import Path

from ...support import envs

LOGGER = "vllm.v1.executor.multiproc_executor"
"""What watches workers logs the name and the exit code of the first that dies."""


class _Deaths(logging.Handler):
    def __init__(self, file: Path) -> None:
        super().__init__(logging.ERROR)
        self._file = file

    def emit(self, record: logging.LogRecord) -> None:
        match record.args:
            case (str(name), int(code)) if name.startswith("Vllm") and not self._file.exists():
                self._file.write_text(json.dumps([name, code]))


def tell_deaths() -> None:
    """Have this process write deaths of its workers to the file that its server names, if there is such a server.

    Idempotent.
    """
    file, logger = envs.engine_deaths(), logging.getLogger(LOGGER)
    if file is not None and not any(isinstance(handler, _Deaths) for handler in logger.handlers):
        logger.addHandler(_Deaths(file))


def told_death(file: Path, pids: Mapping[int, int]) -> str | None:
    """A few words on the worker that died first, if that was told; `pids` are those of ranks."""
    try:
        name, code = json.loads(file.read_text())
    except (OSError, ValueError):
        return None
    rank = name.rpartition("-")[2]
    pid = pids.get(int(rank)) if rank.isdigit() else None
    return f"its worker {rank}{f' (pid {pid})' if pid else ''} {_ended(code)}"


def _ended(code: int) -> str:
    if code >= 0:
        return f"ended with exit code {code}"
    try:
        return f"was ended by {signal.Signals(-code).name}"
    except ValueError:
        return f"was ended by signal {-code}"
