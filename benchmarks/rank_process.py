"""Trainer ranks in processes of their own, without Ray: a port over a pipe."""

from __future__ import annotations

import asyncio
import itertools
import multiprocessing
import os
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import Any, Protocol

import torch

from benchmarks.machine import private_nbytes
from verl.checkpoint_engine.config import CheckpointEngineConfig
from verl.checkpoint_engine.errors import TransportError
from verl.checkpoint_engine.memory.publishing import publisher_environment
from verl.checkpoint_engine.plan.delta_choice import DeltaRequest
from verl.checkpoint_engine.plan.topology import Topology
from verl.checkpoint_engine.ports import WeightSource
from verl.checkpoint_engine.sync.members import Holding, Published
from verl.checkpoint_engine.sync.trainer_rank import TrainerRank


class SteppingSource(WeightSource, Protocol):
    """What a rank holds. Its further methods can be called from outside, too; they run one after the other."""

    def step(self) -> None:
        """Change every weight."""


def serve(pipe: Connection, rank: int, make_source: Callable[[], SteppingSource], config: Any) -> None:
    """A rank's process: answer calls until the other end says goodbye or closes."""
    torch.set_num_threads(1)
    source = make_source()
    asyncio.run(_Server(pipe, TrainerRank(rank, source, config), source).answer())


class _Server:
    """As in a worker: one thread trains, and the calls of a sync are answered meanwhile."""

    def __init__(self, pipe: Connection, trainer: TrainerRank, source: SteppingSource) -> None:
        self._pipe, self._trainer, self._source = pipe, trainer, source
        self._trains = ThreadPoolExecutor(1, thread_name_prefix="trains")

    async def answer(self) -> None:
        calls = set()
        while (call := await asyncio.to_thread(self._receive)) is not None:
            task = asyncio.create_task(self._answer(*call))
            calls.add(task)
            task.add_done_callback(calls.discard)

    def _receive(self) -> tuple[int, str, tuple[Any, ...]] | None:
        try:
            call: tuple[int, str, tuple[Any, ...]] | None = self._pipe.recv()
        except EOFError:
            return None
        return call

    async def _answer(self, number: int, method: str, arguments: tuple[Any, ...]) -> None:
        result, error = None, None
        try:
            if method == "private_nbytes":
                result = private_nbytes()
            elif hasattr(self._trainer, method):
                result = await getattr(self._trainer, method)(*arguments)
            else:
                result = await asyncio.get_running_loop().run_in_executor(self._trains, self._train, method, arguments)
        except Exception as exc:  # noqa: BLE001 - whatever it is belongs to the caller
            error = exc
        self._pipe.send((number, result, error))

    def _train(self, method: str, arguments: tuple[Any, ...]) -> Any:
        if method == "step":
            self._trainer.await_copied()
        return getattr(self._source, method)(*arguments)


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
        self._numbers = itertools.count()
        self._answers: dict[int, Future[Any]] = {}
        self._reader = threading.Thread(target=self._read, name=self.name, daemon=True)
        self._reader.start()

    async def call(self, method: str, *arguments: Any) -> Any:
        """What that method of the trainer rank or of its source returns there; raises what it raises."""
        answer: Future[Any] = Future()
        number = next(self._numbers)
        self._answers[number] = answer
        try:
            self._pipe.send((number, method, arguments))
        except OSError as exc:
            raise TransportError("its process is gone", member=self.name) from exc
        return await asyncio.wrap_future(answer)

    def _read(self) -> None:
        """On a thread of its own: hand answers to those who wait for them."""
        try:
            while True:
                number, result, error = self._pipe.recv()
                answer = self._answers.pop(number)
                if not answer.set_running_or_notify_cancel():
                    continue
                if error is None:
                    answer.set_result(result)
                else:
                    answer.set_exception(error)
        except (EOFError, OSError):
            for answer in list(self._answers.values()):
                if answer.set_running_or_notify_cancel():
                    answer.set_exception(TransportError("its process is gone", member=self.name))

    async def ping(self) -> None:
        await self.call("ping")

    async def describe(self) -> Holding:
        holding: Holding = await self.call("describe")
        return holding

    async def prepare(self, plan: bytes) -> str:
        address: str = await self.call("prepare", plan)
        return address

    async def connect(self, topology: Topology) -> None:
        await self.call("connect", topology)

    async def publish(
        self, version: int, slots: Mapping[str, str], waits: bool, deltas: DeltaRequest | None = None
    ) -> None:
        await self.call("publish", version, dict(slots), waits, deltas)

    async def published(self, version: int) -> Published:
        published: Published = await self.call("published", version)
        return published

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
        with suppress(OSError):
            self._pipe.send(None)
        await asyncio.to_thread(self._process.join, 10)
        if self._process.is_alive():
            self._process.kill()
        self._reader.join(10)
        self._pipe.close()
