"""A rollout node in a process of its own, without Ray, that can be killed and replaced."""

from __future__ import annotations

import asyncio
import multiprocessing
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from verl.checkpoint_engine.config import CheckpointEngineConfig
from verl.checkpoint_engine.errors import TransportError
from verl.checkpoint_engine.sync.rollout_node import RolloutNode


def serve(
    pipe: Connection,
    index: int,
    config: CheckpointEngineConfig,
    job: str,
    shm_dir: Path,
    enter: Callable[[], None] | None,
) -> None:
    """The node's process: answer calls until the pipe closes."""
    if enter is not None:
        enter()
    node = RolloutNode(index, config, job=job, shm_dir=shm_dir)
    with asyncio.Runner() as runner:
        while True:
            try:
                method, arguments = pipe.recv()
            except EOFError:
                return
            try:
                pipe.send((runner.run(getattr(node, method)(*arguments)), None))
            except Exception as exc:  # noqa: BLE001 - whatever it is belongs to the caller
                pipe.send((None, exc))


class NodeProcess:
    """A `NodePort`. `end` it."""

    def __init__(
        self,
        index: int,
        config: CheckpointEngineConfig,
        *,
        job: str,
        shm_dir: Path,
        enter: Callable[[], None] | None = None,
    ) -> None:
        """`enter` is called first in the process."""
        self.name = f"node-{index}"
        self._arguments = (index, config, job, shm_dir, enter)
        self._start()

    def _start(self) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload([__name__])
        self._pipe, its_end = context.Pipe()
        self._process = context.Process(target=serve, args=(its_end, *self._arguments), name=self.name, daemon=True)
        self._process.start()
        its_end.close()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix=self.name)

    @property
    def pid(self) -> int:
        assert self._process.pid is not None
        return self._process.pid

    def replace(self) -> None:
        """Another process takes the place of this one."""
        self.end()
        self._start()

    def end(self) -> None:
        """Idempotent."""
        self._pipe.close()
        self._process.join(10)
        if self._process.is_alive():
            self._process.kill()
        self._thread.shutdown(wait=False)

    def __getattr__(self, method: str) -> Callable[..., Any]:
        async def call(*arguments: Any) -> Any:
            return await asyncio.get_running_loop().run_in_executor(self._thread, self._ask, method, arguments)

        return call

    def _ask(self, method: str, arguments: tuple[Any, ...]) -> Any:
        try:
            self._pipe.send((method, arguments))
            result, error = self._pipe.recv()
        except (EOFError, OSError) as exc:
            raise TransportError("its process is gone", member=self.name) from exc
        if error is not None:
            raise error
        return result
