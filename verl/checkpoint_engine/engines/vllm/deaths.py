"""Report the worker of an engine that died: vLLM's engine core only logs it, and reports a failure to its client.

Each data-parallel rank has an engine core, which counts its workers from 0.
"""

from __future__ import annotations

import json
import logging
import multiprocessing
import signal
from collections.abc import Mapping
from pathlib import Path

from ...compat.processes import child
from ...support import envs

LOGGER = "vllm.v1.executor.multiproc_executor"
"""The logger of vLLM's monitor, which logs name and exit code of the first dead worker."""
REAPED_WITHIN_S = 1.0


class _Deaths(logging.Handler):
    def __init__(self, file: Path) -> None:
        super().__init__(logging.ERROR)
        self._file = file

    def emit(self, record: logging.LogRecord) -> None:
        match record.args:
            case (str(name), int() | None as code) if name.startswith("Vllm") and not self._file.exists():
                code = _reaped(name) if code is None else code
                self._file.write_text(json.dumps([name, code, multiprocessing.current_process().name]), "utf-8")


def _reaped(name: str) -> int | None:
    """The exit code of a child that is gone, and was not asked for it yet: its pipe closes a moment before."""
    gone = child(name)
    if gone is None:
        return None
    gone.join(REAPED_WITHIN_S)
    return gone.exitcode


def tell_deaths() -> None:
    """Make this process write the first death of its workers to the file that its server names, if it names one.

    Idempotent.
    """
    file, logger = envs.engine_deaths(), logging.getLogger(LOGGER)
    if file is not None and not any(isinstance(handler, _Deaths) for handler in logger.handlers):
        logger.addHandler(_Deaths(file))


def told_death(file: Path, pids: Mapping[int, int], of_core: int) -> str | None:
    """Describe the worker that died first, or None if `file` has none. `pids`: rank to pid. `of_core`: workers of each
    engine core."""
    try:
        name, code, core = json.loads(file.read_text("utf-8"))
    except (OSError, ValueError):
        return None
    data_rank = core.rpartition("_DP")[2]
    own, first = name.rpartition("-")[2], of_core * int(data_rank) if data_rank.isdigit() else 0
    rank = first + int(own) if own.isdigit() else own
    told = [f"pid {pids[rank]}"] if rank in pids else []
    told += [f"data-parallel rank {data_rank}"] if data_rank.isdigit() else []
    return " ".join(["its worker", str(rank), *([f"({', '.join(told)})"] if told else []), _ended(code)])


def _ended(code: int | None) -> str:
    if code is None:
        return "died"
    if code >= 0:
        return f"ended with exit code {code}"
    try:
        return f"was ended by {signal.Signals(-code).name}"
    except ValueError:
        return f"was ended by signal {-code}"
