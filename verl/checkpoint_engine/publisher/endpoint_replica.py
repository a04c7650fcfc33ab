"""A `vllm serve` as a replica of the manager's: it maps the arena of its host's rollout node and loads from there."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

from ..parameter_server.endpoints import Endpoint


class EndpointReplica:
    """Implements `verl.checkpoint_engine.ports.Replica` over HTTP. Its name is its URL."""

    def __init__(self, url: str, node_index: int, *, timeout_s: float) -> None:
        """`node_index`: of its host's node. `timeout_s`: for each request. Raises ConfigError for what is no URL."""
        self._endpoint = Endpoint(url, timeout_s=timeout_s)
        self.node_index = node_index

    @property
    def name(self) -> str:
        return self._endpoint.url

    async def check(self, tensors: Mapping[str, tuple[str, tuple[int, ...]]]) -> None:
        """Hold names, dtypes and shapes against the engine's model. It goes on serving. Raises as `Endpoint.check`."""
        await asyncio.to_thread(self._endpoint.check, None, tensors)

    async def pause(self, mode: str) -> None:
        await asyncio.to_thread(self._endpoint.pause, mode)

    async def activate(self, arena_path: str, version: int) -> None:
        update = {"arena_path": arena_path, "version": version}
        await asyncio.to_thread(self._endpoint.load, update, str(version))

    async def resume(self) -> None:
        await asyncio.to_thread(self._endpoint.resume)

    async def health(self) -> None:
        await asyncio.to_thread(self._endpoint.version)

    async def sleep(self) -> None:
        """The server's memory is its own business, as is the rest below."""

    async def wake_up(self) -> None: ...

    async def release_kv_cache(self) -> None: ...

    async def resume_kv_cache(self) -> None: ...
