"""What gloo can do by itself: broadcasts in buckets, two in flight, between two processes of this machine."""

from __future__ import annotations

import time
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any

import torch
from torch._C._distributed_c10d import BroadcastOptions, PrefixStore, ProcessGroupGloo, Store, TCPStore, Work

from benchmarks.processes import end_processes, fresh_processes

TIMEOUT = timedelta(seconds=120)
BUCKET_NBYTES = 64 * 2**20


class GlooPair:
    """Two processes with a buffer of `nbytes` each. Close it."""

    def __init__(self, nbytes: int) -> None:
        self._store = TCPStore("127.0.0.1", 0, is_master=True, timeout=TIMEOUT, wait_for_workers=False)
        context = fresh_processes()
        self._pipes: list[Connection] = []
        self._processes = []
        for rank in range(2):
            ours, theirs = context.Pipe()
            arguments = (theirs, rank, self._store.port, nbytes)
            process = context.Process(target=_serve, args=arguments, name=f"raw-gloo-{rank}", daemon=True)
            process.start()
            theirs.close()
            self._pipes.append(ours)
            self._processes.append(process)

    def gbytes_per_s(self, bucket_nbytes: int = BUCKET_NBYTES) -> float:
        """Of broadcasting the buffer once, timed at the receiver, from before a first byte until the last."""
        for pipe in self._pipes:
            pipe.send(bucket_nbytes)
        rates: list[float] = [pipe.recv() for pipe in self._pipes]
        return rates[1]

    def close(self) -> None:
        end_processes(self._pipes, self._processes)

    def __enter__(self) -> GlooPair:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _serve(pipe: Connection, rank: int, port: int, nbytes: int) -> None:
    torch.set_num_threads(1)
    store = TCPStore("127.0.0.1", port, is_master=False, timeout=TIMEOUT, wait_for_workers=False)
    group = group_of_two(PrefixStore("raw", store), rank)
    buffer = torch.full((nbytes,), 1 + rank, dtype=torch.uint8)
    while True:
        try:
            bucket_nbytes = pipe.recv()
        except EOFError:
            return
        pipe.send(_rate(group, buffer, bucket_nbytes))


def group_of_two(store: Store, rank: int) -> Any:
    """A gloo group over the loopback device; returns when the other of the two has called it, too."""
    gloo: Any = ProcessGroupGloo
    options = gloo._Options()
    options._devices = [gloo.create_device(hostname="127.0.0.1")]
    options._timeout = TIMEOUT
    return gloo(store, rank, 2, options)


def _rate(group: Any, buffer: torch.Tensor, bucket_nbytes: int) -> float:
    broadcast(group, buffer[:1]).wait()
    start_s = time.perf_counter()
    flying: list[Work] = []
    for start in range(0, len(buffer), bucket_nbytes):
        if len(flying) == 2:
            flying.pop(0).wait()
        flying.append(broadcast(group, buffer[start : start + bucket_nbytes]))
    for work in flying:
        work.wait()
    return len(buffer) / (time.perf_counter() - start_s) / 1e9


def broadcast(group: Any, memory: torch.Tensor) -> Work:
    options = BroadcastOptions()
    options.rootRank = options.rootTensor = 0
    work: Work = group.broadcast([memory], options)
    return work
