"""Write training checkpoints while their rank trains on: `checkpoint.async_save`."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist

from verl.checkpoint_engine.errors import TransportTimeout
from verl.checkpoint_engine.memory.host_memory import free_host_nbytes
from verl.workers.engine.checkpoint_files import Loan, write_state

logger = logging.getLogger(__name__)

MOST_OF_FREE = 0.5
"""The most of the host's free memory to use: the run allocates from the rest later."""


@dataclass(frozen=True)
class Written:
    """The time of one or several checkpoints."""

    background_s: float = 0.0
    """Seconds to copy and to write them."""
    waited_s: float = 0.0
    """Seconds that optimizer steps waited for the copy of the state before them."""


class BackgroundWriter:
    """Copies one rank's part of a state into host memory, and writes it from there, one state at a time.

    Made on every rank, between the same collectives. Its thread has its own process group. Used on the rank's thread,
    except `written`.
    """

    def __init__(
        self, *, local_ranks: int, timeout_s: float, free_nbytes: Callable[[], int] = free_host_nbytes
    ) -> None:
        """`local_ranks` share the memory of this host."""
        self._local_ranks, self._timeout_s, self._free_nbytes = local_ranks, timeout_s, free_nbytes
        self._group = dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout_s))
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="save-checkpoint")
        self._loans: list[Loan] = []
        self._writing: list[Future[float]] = []
        self._waited_s = 0.0

    def write(self, directory: Path, state: dict[str, Any]) -> None:
        """Begin to write a state. `state` is borrowed until `await_copied` returns."""
        loan = Loan(self._may_copy)

        def work() -> float:
            began = time.monotonic()
            write_state(directory, state, loan=loan, group=self._group)
            return time.monotonic() - began

        if state:
            self._loans.append(loan)
            self._writing.append(self._thread.submit(work))

    def await_copied(self) -> None:
        """Wait until no state is borrowed any more. Raises TransportTimeout."""
        loans, self._loans = self._loans, []
        began = time.monotonic()
        for loan in loans:
            if not loan.returned.wait(self._timeout_s):
                raise TransportTimeout(
                    f"a checkpoint still needs the training state after {self._timeout_s:g} s (checkpoint.async_save)"
                )
        self._waited_s += time.monotonic() - began

    async def written(self) -> Written:
        """Wait until all states are on disk, on all ranks. Raises the error of a write."""
        writing, self._writing = self._writing, []
        for one in writing:
            await asyncio.wait([asyncio.wrap_future(one)])
        waited_s, self._waited_s = self._waited_s, 0.0
        return Written(sum(one.result() for one in writing), waited_s)

    def _may_copy(self, nbytes: int) -> bool:
        most = MOST_OF_FREE * self._free_nbytes() / self._local_ranks
        if nbytes > most and dist.get_rank() == 0:
            logger.warning(
                "checkpoint.async_save: %d bytes are more than this rank's part of half of the host's free memory, %d: "
                "the next optimizer step waits until they are on disk",
                nbytes,
                most,
            )
        return nbytes <= most
