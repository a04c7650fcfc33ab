"""Ranks of a group over gloo, forks of this process, which is their driver. For scripts of either verl."""

import os
import pickle
import tempfile
import traceback
from collections.abc import Callable, Sequence
from multiprocessing import Pipe
from multiprocessing.connection import wait
from typing import Any

import torch
import torch.distributed as dist


class Ranks:
    """`call` runs a function on all of them, at the same time. They end with this process."""

    def __init__(self, count: int) -> None:
        store = tempfile.mktemp()
        self.count, self._connections = count, []
        for rank in range(count):
            here, there = Pipe()
            if not os.fork():
                for connection in (here, *self._connections):
                    connection.close()
                join(rank, count, store)
                serve(there)
            there.close()
            self._connections.append(here)

    def call(self, function: Callable[..., Any], calls: Sequence[Sequence[Any]]) -> list[Any]:
        """`function(*calls[rank])` on every rank; the results by rank. Raises the first error of a rank."""
        for connection, arguments in zip(self._connections, calls, strict=True):
            connection.send_bytes(pickle.dumps((function, arguments)))
        results: dict[int, Any] = {}
        while len(results) < self.count:
            for connection in wait([each for rank, each in enumerate(self._connections) if rank not in results]):
                error, result = pickle.loads(connection.recv_bytes())
                if error:
                    raise RuntimeError(error)
                results[self._connections.index(connection)] = result
        return [results[rank] for rank in range(self.count)]


def save(module: Any, file: str) -> None:
    """The weights, from the first rank; a collective."""
    tensors = {name: value.detach() for name, value in module.state_dict().items()}
    whole = {name: value.full_tensor() if hasattr(value, "full_tensor") else value for name, value in tensors.items()}
    if dist.get_rank() == 0:
        torch.save(whole, file)


def join(rank: int, count: int, store: str) -> None:
    """As verl's workers read it from the environment."""
    number, ranks = str(rank), str(count)
    os.environ |= {"RANK": number, "LOCAL_RANK": number, "RAY_LOCAL_RANK": number, "WORLD_SIZE": ranks}
    os.environ |= {"LOCAL_WORLD_SIZE": ranks, "RAY_LOCAL_WORLD_SIZE": ranks, "MASTER_ADDR": "127.0.0.1"}
    os.environ |= {"MASTER_PORT": "1"}
    dist.init_process_group("gloo", rank=rank, world_size=count, store=dist.FileStore(store, count))


def serve(connection: Any) -> None:
    while True:
        try:
            function, arguments = pickle.loads(connection.recv_bytes())
        except (EOFError, ConnectionResetError):
            os._exit(0)
        try:
            answer = None, function(*arguments)
        except Exception:  # noqa: BLE001 - told by the driver
            answer = traceback.format_exc(), None
        connection.send_bytes(pickle.dumps(answer))
