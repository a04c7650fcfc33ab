"""Trainer ranks in processes of their own, without Ray: a port over a pipe."""

from __future__ import annotations

import asyncio
import multiprocessing
import os
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection
from typing import Any, Protocol

import torch

from benchmarks.machine import private_nbytes
from verl.checkpoint_engine.config import CheckpointEngineConfig
from verl.checkpoint_engine.errors import TransportError
from verl.checkpoint_engine.participants import Holding, Published, TrainerRank
from verl.checkpoint_engine.ports import WeightSource
from verl.checkpoint_engine.publishing import publisher_environment
from verl.checkpoint_engine.topology import Topology


class SteppingSource(WeightSource, Protocol):
    """What a rank holds. Its further async methods can be called from outside, too."""

    async def step(self) -> None:
        """Change every weight."""


def serve(pipe: Connection, rank: int, make_source: Callable[[], SteppingSource], config: Any) -> None:
    """A rank's process: answer calls until the pipe closes."""
    torch.set_num_threads(1)
    source = make_source()
    trainer = TrainerRank(rank, source, config)
    with asyncio.Runner() as runner:
        while True:
            try:
                method, arguments = pipe.recv()
            except EOFError:
                return
            try:
                if method == "private_nbytes":
                    pipe.send((private_nbytes(), None))
                    continue
                call = getattr(trainer if hasattr(trainer, method) else source, method)
                pipe.send((runner.run(call(*arguments)), None))
            except Exception as exc:  # noqa: BLE001 - whatever it is belongs to the caller
                pipe.send((None, exc))


class RankProcess:
    """A `TrainerPort` to a rank that `serve`s in a process of its own, which makes the source. Close it.

    `start_method` is one of multiprocessing's that begin with a fresh process.
    """

    def __init__(
        self,
        rank: int,
        make_source: Callable[[], SteppingSource],
        config: CheckpointEngineConfig,
        *,
        start_method: str = "spawn",
    ) -> None:
        self.name = f"trainer-{rank}"
        context: Any = multiprocessing.get_context(start_method)
        self._pipe, its_end = context.Pipe()
        self._process = context.Process(
            target=serve, args=(its_end, rank, make_source, config), name=self.name, daemon=True
        )
        before = dict(os.environ)
        os.environ.update(publisher_environment())  # glibc reads it when the process begins
        try:
            self._process.start()
        finally:
            os.environ.clear()
            os.environ.update(before)
        its_end.close()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix=self.name)

    async def call(self, method: str, *arguments: Any) -> Any:
        """What that method of the trainer rank or of its source returns there; raises what it raises."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, self._ask, method, arguments)

    def _ask(self, method: str, arguments: tuple[Any, ...]) -> Any:
        try:
            self._pipe.send((method, arguments))
            result, error = self._pipe.recv()
        except (EOFError, OSError) as exc:
            raise TransportError("its process is gone", member=self.name) from exc
        if error is not None:
            raise error
        return result

    async def describe(self) -> Holding:
        holding: Holding = await self.call("describe")
        return holding

    async def prepare(self, plan: bytes) -> str:
        address: str = await self.call("prepare", plan)
        return address

    async def connect(self, topology: Topology) -> None:
        await self.call("connect", topology)

    async def publish(self, version: int, slots: Mapping[str, str], waits: bool) -> Published:
        published: Published = await self.call("publish", version, dict(slots), waits)
        return published

    async def digest(self, version: int) -> bytes:
        digests: bytes = await self.call("digest", version)
        return digests

    async def serve(self, version: int) -> int:
        moved: int = await self.call("serve", version)
        return moved

    async def step(self) -> None:
        await self.call("step")

    async def private_nbytes(self) -> int:
        """Memory that belongs to the rank's process alone: not the arena that it may have mapped."""
        nbytes: int = await self.call("private_nbytes")
        return nbytes

    async def close(self) -> None:
        """End the process. Idempotent."""
        self._pipe.close()
        await asyncio.to_thread(self._process.join, 10)
        if self._process.is_alive():
            self._process.kill()
        self._thread.shutdown(wait=False)
