"""A `vllm serve` of this host as a replica of the manager's: it maps the arena and loads from there."""

from __future__ import annotations

import asyncio
import ipaddress
import socket
import urllib.parse
from collections.abc import Mapping

from ..errors import ConfigError
from ..parameter_server.endpoints import Endpoint
from ..support.network import host_addresses


class EndpointReplica:
    """Implements `verl.checkpoint_engine.ports.Replica` over HTTP. Its name is its URL."""

    node_index = 0

    def __init__(self, url: str, *, timeout_s: float) -> None:
        """`timeout_s` is for each request. Raises ConfigError for what is no URL, or one of another host."""
        self._endpoint = Endpoint(url, timeout_s=timeout_s)
        host = urllib.parse.urlsplit(url).hostname or ""
        if not _is_here(host):
            raise ConfigError(
                f"{url} is not on this host ({socket.gethostname()}): an engine maps the memory into which weights are "
                "published, so publish on its host"
            )

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


def _is_here(host: str) -> bool:
    try:
        found = {str(info[4][0]) for info in socket.getaddrinfo(host, None)}
    except OSError as exc:
        raise ConfigError(f"no host is called {host!r}: {exc}") from exc
    return any(address in host_addresses() or ipaddress.ip_address(address).is_loopback for address in found)
