"""Trainer ranks in processes of their own, without Ray: a port over a pipe."""

from __future__ import annotations

import asyncio
import multiprocessing
import os
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection
from typing import Any

import torch

from benchmarks.machine import private_nbytes
from benchmarks.synthetic_model import RowsOfModel
from verl.checkpoint_engine.config import CheckpointEngineConfig
from verl.checkpoint_engine.errors import TransportError
from verl.checkpoint_engine.participants import Holding, Published, TrainerRank
from verl.checkpoint_engine.publishing import publisher_environment
from verl.checkpoint_engine.topology import Topology
from verl.checkpoint_engine.types import TensorSpec


def serve(pipe: Connection, rank: int, world_size: int, specs: list[TensorSpec], dtype: str, config: Any) -> None:
    """A rank's process: answer calls until the pipe closes."""
    torch.set_num_threads(1)
    source = RowsOfModel(specs, rank, world_size, dtype)
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
                call = source.step if method == "step" else getattr(trainer, method)
                pipe.send((runner.run(call(*arguments)), None))
            except Exception as exc:  # noqa: BLE001 - whatever it is belongs to the caller
                pipe.send((None, exc))


class RankProcess:
    """A `TrainerPort` to a rank that `serve`s in a process of its own. Close it."""

    def __init__(
        self, rank: int, world_size: int, specs: list[TensorSpec], source_dtype: str, config: CheckpointEngineConfig
    ) -> None:
        self.name = f"trainer-{rank}"
        spawn = multiprocessing.get_context("spawn")
        self._pipe, its_end = spawn.Pipe()
        self._process = spawn.Process(
            target=serve, args=(its_end, rank, world_size, specs, source_dtype, config), name=self.name, daemon=True
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

    async def _call(self, method: str, *arguments: Any) -> Any:
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
        holding: Holding = await self._call("describe")
        return holding

    async def prepare(self, plan: bytes) -> str:
        address: str = await self._call("prepare", plan)
        return address

    async def connect(self, topology: Topology) -> None:
        await self._call("connect", topology)

    async def publish(self, version: int, slots: Mapping[str, str]) -> Published:
        published: Published = await self._call("publish", version, dict(slots))
        return published

    async def digest(self, version: int) -> bytes:
        digests: bytes = await self._call("digest", version)
        return digests

    async def serve(self, version: int) -> int:
        moved: int = await self._call("serve", version)
        return moved

    async def step(self) -> None:
        await self._call("step")

    async def private_nbytes(self) -> int:
        """Memory that belongs to the rank's process alone: not the arena that it may have mapped."""
        nbytes: int = await self._call("private_nbytes")
        return nbytes

    async def close(self) -> None:
        """End the process. Idempotent."""
        self._pipe.close()
        await asyncio.to_thread(self._process.join, 10)
        if self._process.is_alive():
            self._process.kill()
        self._thread.shutdown(wait=False)
