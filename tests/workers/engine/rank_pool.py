"""Processes that play the ranks of a trainer: started once, then given one function after another."""

from __future__ import annotations

import tempfile
import traceback
import warnings
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from tests import forked

TIMEOUT_S = 400.0
RUNS = 8
"""So many functions the same processes are given. Caches of models and meshes keep the groups of what is over, and each
group's threads look a hundred times a second whether there is something to do: some 1,800 slowed a whole run down."""


class RankPool:
    """`run(function, world_size, *arguments)` calls `function(*arguments)` on so many ranks of a fresh gloo group.

    Returns the results by rank. `function` is defined at the top of a test module, so that the processes can import it.
    """

    def __init__(self, size: int) -> None:
        self._size, self._runs = size, 0
        self._start()

    def _start(self) -> None:
        started = [forked.start(_serve) for _ in range(self._size)]
        self._processes = [process for process, _ in started]
        self._connections = [connection for _, connection in started]

    def run(self, function: Callable[..., Any], world_size: int, *arguments: Any) -> list[Any]:
        self._runs += 1
        if self._runs % RUNS == 0:
            self.close()
            self._start()
        connections = self._connections[:world_size]
        with tempfile.TemporaryDirectory() as directory:
            store = Path(directory) / "store"
            for rank, connection in enumerate(connections):
                connection.send((rank, world_size, str(store), function, arguments))
            answers = [
                connection.recv() if connection.poll(TIMEOUT_S) else (f"rank {rank} gave no answer", None)
                for rank, connection in enumerate(connections)
            ]
        failures = [failure for failure, _ in answers if failure]
        if failures:
            raise AssertionError("\n".join(failures))
        return [result for _, result in answers]

    def close(self) -> None:
        for connection in self._connections:
            connection.close()
        for process in self._processes:
            process.kill()
            process.join()


def _serve(connection: Connection) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    warnings.simplefilter("error")  # as pytest has it in its own process
    while True:
        try:
            rank, world_size, store, function, arguments = connection.recv()
        except EOFError:
            return
        try:
            dist.init_process_group(
                "gloo",
                init_method=f"file://{store}",
                rank=rank,
                world_size=world_size,
                timeout=timedelta(seconds=TIMEOUT_S / 2),
            )
            answer: tuple[str | None, Any] = (None, function(*arguments))
        except BaseException:  # noqa: BLE001 - whatever it was, the test process reports it
            answer = (f"rank {rank}:\n{traceback.format_exc()}", None)
        finally:
            if dist.is_initialized():
                dist.destroy_process_group()
        connection.send(answer)
