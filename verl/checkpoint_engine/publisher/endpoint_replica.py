"""A server of vLLM or SGLang as a replica of the manager: it maps the arena of its host's rollout node and loads from
it."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from threading import Event, Thread
from typing import Any, Protocol

from ..config import CheckpointEngineConfig
from ..errors import CheckpointEngineError, TransportError
from ..parameter_server.endpoints import Endpoint
from ..parameter_server.rescue import Rescue
from ..parameter_server.writers import Writer
from ..support.apart import apart
from .committed import require_digest
from .reports import Reports
from .sglang_endpoint import IN_PLACE, SGLangEndpoint, is_sglang

Tensors = Mapping[str, tuple[str, tuple[int, ...]]]
"""Tensor name to (dtype, shape)."""


class Server(Protocol):
    """The interface that a push needs of a server. Methods that are not async block."""

    engine: str

    def check(self, tensors: Tensors) -> Mapping[str, str]: ...
    async def claim(self) -> str: ...
    async def release(self) -> None: ...
    def pause(self, mode: str) -> None: ...
    async def activate(self, arena_path: str, version: int) -> None: ...
    def resume(self) -> None: ...
    @property
    def is_torn(self) -> bool:
        """Whether a load has begun on its ranks and not ended. A rescue cannot find this out while it is paused."""
        ...

    def go_on(self, version: int, timeout_s: float) -> None:
        """As `EndpointReplica.go_on`, for a paused server. `timeout_s`: for each request."""
        ...

    def version(self) -> str: ...
    def again(self, kept: str | None, version: int) -> Mapping[str, Any]:
        """The data that a rescue needs to load again: see `rescue.Again`."""
        ...


class VLLMServer:
    engine, is_torn = "vLLM", False

    def __init__(self, url: str, writer: Writer, *, timeout_s: float) -> None:
        self._endpoint, self._writer = Endpoint(url, timeout_s=timeout_s), writer
        self.pause, self.resume, self.version = self._endpoint.pause, self._endpoint.resume, self._endpoint.version

    def go_on(self, version: int, timeout_s: float) -> None:
        Endpoint(self._endpoint.url, timeout_s=timeout_s).go_on(version, self._writer)

    def check(self, tensors: Tensors) -> Mapping[str, str]:
        self._endpoint.check(None, tensors)
        return self._endpoint.copies()

    async def claim(self) -> str:
        return await apart(self._endpoint.claim, self._writer)

    async def release(self) -> None:
        await apart(self._endpoint.release, self._writer)

    async def activate(self, arena_path: str, version: int) -> None:
        update = {"arena_path": arena_path, "version": version}
        loaded = await apart(self._endpoint.load, update, str(version), self._writer)
        await apart(require_digest, arena_path, version, loaded)

    def again(self, kept: str | None, version: int) -> Mapping[str, Any]:
        """Empty: a rescue knows vLLM's requests."""
        return {}


class EndpointReplica:
    """A `verl.checkpoint_engine.ports.Replica` over HTTP. Its name is its URL."""

    def __init__(
        self,
        url: str,
        node_index: int,
        config: CheckpointEngineConfig,
        *,
        timeout_s: float,
        reports: Reports,
        writer: Writer | None = None,
        rescue: Rescue | None = None,
    ) -> None:
        """`node_index`: that of its host's rollout node. `timeout_s`: for each request. `reports`: those of its host.
        `writer`: who claims the server, by default this replica. `rescue` resumes the server if this process dies while
        it is paused. Raises ConfigError for an invalid URL."""
        self.name = url
        self.node_index = node_index
        self._config, self._timeout_s, self._reports = config, timeout_s, reports
        self._rescue = rescue
        self._is_paused, self.answers = False, True
        self._writer = writer or Writer.here("publisher")
        self._server: Server = VLLMServer(url, self._writer, timeout_s=timeout_s)

    async def check(self, tensors: Tensors) -> Mapping[str, str]:
        """Compare names, dtypes and shapes with the engine's model, before all else; the server keeps serving. Returns
        tensor to twin for tensors without a place in the model, which uses the twin: both must have equal values.
        Raises ConfigError, ActivationError, TransportError."""
        sought, sglang = "server of vLLM or SGLang", None
        try:
            if await apart(is_sglang, self.name):
                sglang, sought = self._server if isinstance(self._server, SGLangEndpoint) else self._sglang(), "SGLang"
                self._server = sglang
            copies = await apart(self._server.check, tensors)
        except TransportError as exc:
            raise TransportError(
                f"no {sought} answers at {self.name} ({exc.message}): start it, or remove it from the endpoints"
            ) from exc

        return copies if sglang is None or self._config.check_engine == "off" else await self._fit(sglang, tensors)

    async def _fit(self, server: SGLangEndpoint, tensors: Tensors) -> Mapping[str, str]:
        """SGLang tells that only while it is paused: its requests wait in their places, and go on."""
        was_claimed = server.is_claimed
        await server.claim()
        try:
            await self.pause(IN_PLACE)
            try:
                return await server.fit(tensors)
            finally:
                if not server.is_torn:
                    await self.resume()
        except CheckpointEngineError:
            if not was_claimed:
                await server.release()
            raise

    async def claim(self) -> str:
        """Claim the server for its writer, or renew the claim; returns the server's identity. It continues to serve.

        Raises ConfigError if it belongs to another writer, ActivationError, TransportError."""
        return await self._server.claim()

    async def release(self) -> None:
        """Release the claim, so that another writer can claim the server. Raises as `claim`."""
        await self._server.release()

    def _sglang(self) -> SGLangEndpoint:
        return SGLangEndpoint(
            self.name,
            timeout_s=self._timeout_s,
            check_engine=self._config.check_engine,
            pause_mode=self._config.pause_mode,
            reports=self._reports,
            host=self.node_index,
            who=self._writer.who,
        )

    async def pause(self, mode: str) -> None:
        """Stop generating. If this call is cancelled and the server pauses later, it is resumed at once."""
        is_paused, given_up = Event(), Event()
        self._is_paused = True
        if self._rescue is not None and not self._server.is_torn:
            self._rescue.pausing(self.name, self._server.engine)

        def pause() -> None:
            self._server.pause(mode)
            is_paused.set()
            if given_up.is_set():
                self._server.resume()

        try:
            await self._ask(pause)
        except asyncio.CancelledError:
            given_up.set()
            if is_paused.is_set():
                Thread(target=self._resume_if_whole, daemon=True).start()
            raise

    def _resume_if_whole(self) -> None:
        with suppress(CheckpointEngineError):
            self._server.resume()

    async def activate(self, arena_path: str, version: int) -> None:
        if self._rescue is not None:
            self._rescue.loading(self.name, self._server.engine, arena_path, version, again=self._server.again)
        await self._told(self._server.activate(arena_path, version))

    async def resume(self) -> None:
        await self._ask(self._server.resume)
        self._serves()

    async def go_on(self, version: int) -> None:
        """After an aborted push of `version`: if the server is still paused, resume it with the weights that it holds.
        Raises ActivationError if a load has torn its weights, TransportError, TransportTimeout after `resume_s`: no
        request of it is sent later, when another push may have paused the server."""
        if self._is_paused:
            await self._ask(self._server.go_on, version, self._config.deadlines.resume_s)
            self._serves()

    def _serves(self) -> None:
        self._is_paused = False
        if self._rescue is not None:
            self._rescue.serving(self.name, self._server.engine)

    async def health(self) -> None:
        await self._ask(self._server.version)

    async def _ask(self, question: Callable[..., object], *arguments: object) -> None:
        await self._told(apart(question, *arguments))

    async def _told(self, answer: Awaitable[object]) -> None:
        self.answers = True
        try:
            await answer
        except TransportError as exc:
            self.answers = False
            raise type(exc)(f"{self._server.engine} does not answer: {exc.message}", member=self.name) from exc

    async def sleep(self) -> None:
        """Does nothing, as the methods below: the user manages the server's memory."""

    async def wake_up(self) -> None: ...

    async def release_kv_cache(self) -> None: ...

    async def resume_kv_cache(self) -> None: ...
