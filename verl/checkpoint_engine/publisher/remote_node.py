"""The manager's port to a rollout node of `verl-sync node` on another host."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any, cast

import msgspec

from ..config import CheckpointEngineConfig
from ..errors import ActivationError, TransportError
from ..plan.encoded import unpacked
from ..support.package import PACKAGE
from ..sync.members import NodePort, methods_of
from .node_link import HANDSHAKE_S, METHODS, OPEN, Answer, Call, Cancel, Failure, Link, ask_in
from .reports import CLAIM, MAKE, RELEASE, TAKE

GONE = (OSError, EOFError, TransportError)
COMMAND = f"python -m {PACKAGE}.node"


class RemoteNode:
    """A `NodePort` over a `Link`. It connects at its first call, and again after the node's process or host was lost.

    Called on one event loop. The node lives as long as the connection: its process removes the arena when the publisher
    is gone.
    """

    def __init__(
        self, index: int, place: tuple[str, int], key: bytes, config: CheckpointEngineConfig, job: str
    ) -> None:
        self.index = index
        self._place, self._key, self._config, self._job = place, key, config, job
        self._link: Link | None = None
        self._asked: dict[int, asyncio.Future[Answer | Failure]] = {}
        self._telling: set[asyncio.Task[None]] = set()
        self._calls = 0
        self._connecting = asyncio.Lock()
        self._reading: asyncio.Task[None] | None = None

    @property
    def name(self) -> str:
        return f"node-{self.index}"

    @property
    def _at(self) -> str:
        return f"{self._place[0]}:{self._place[1]}"

    async def ask(self, method: str, arguments: tuple[Any, ...]) -> Any:
        """Call `method` of the node. Raises the node's errors; TransportError if it cannot be reached."""
        async with self._connecting:
            link = self._link or await self._connected()
        return await self._ask(link, method, arguments)

    async def _connected(self) -> Link:
        try:
            async with asyncio.timeout(HANDSHAKE_S):
                link = await ask_in(*self._place, self._key)
        except (*GONE, TimeoutError) as exc:
            why = "it says nothing" if isinstance(exc, TimeoutError | EOFError) else getattr(exc, "message", str(exc))
            raise TransportError(
                f"no rollout node is available at {self._at}: {why}. Is `{COMMAND}` running there, with the same key?",
                member=self.name,
            ) from exc
        self._reading = asyncio.create_task(self._read(link))
        try:
            await self._ask(link, OPEN, (self.index, self._config, self._job))
        except BaseException:
            self._reading.cancel()
            link.close()
            raise
        self._link = link
        return link

    async def _ask(self, link: Link, method: str, arguments: tuple[Any, ...]) -> Any:
        number, self._calls = self._calls, self._calls + 1
        answered = self._asked[number] = asyncio.get_running_loop().create_future()
        try:
            await link.send(Call(number, method, msgspec.Raw(msgspec.msgpack.encode(arguments))))
            outcome = await answered
        except OSError as exc:
            raise self._lost() from exc
        except asyncio.CancelledError:
            # Not awaited: a host that is gone takes no message, and whoever cancels has no time for that.
            telling = asyncio.create_task(self._tell(link, Cancel(number)))
            self._telling.add(telling)
            telling.add_done_callback(self._telling.discard)
            raise
        finally:
            self._asked.pop(number, None)
        if isinstance(outcome, Failure):
            raise outcome.error()
        return unpacked(outcome.value, METHODS[method].returned, f"what {method} returns")

    async def _tell(self, link: Link, message: Cancel) -> None:
        with suppress(OSError):
            await link.send(message)

    async def _read(self, link: Link) -> None:
        """Give answers to those who wait, until the connection is gone."""
        with suppress(*GONE):
            while True:
                message = await link.receive()
                waiting = self._asked.get(message.number)
                if isinstance(message, Answer | Failure) and waiting is not None and not waiting.done():
                    waiting.set_result(message)
        link.close()
        self._link = None
        for waiting in self._asked.values():
            if not waiting.done():
                waiting.set_exception(self._lost())

    def _lost(self) -> TransportError:
        return TransportError(f"the rollout node at {self._at} has gone", member=self.name)

    async def close(self) -> None:
        """Remove the arena, if the node is connected: without a connection it has none."""
        if self._link is not None:
            link = self._link
            with suppress(*GONE):
                await self._ask(link, "close", ())
            link.close()
        for task in [*self._telling, *([self._reading] if self._reading is not None else [])]:
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task


def _asks(method: str) -> Callable[..., Awaitable[Any]]:
    async def ask(self: RemoteNode, *arguments: Any) -> Any:
        return await self.ask(method, arguments)

    return ask


for _method in methods_of(NodePort) - {"close"}:
    setattr(RemoteNode, _method, _asks(_method))


def remote_node(
    index: int, place: tuple[str, int], key: bytes, config: CheckpointEngineConfig, *, job: str
) -> NodePort:
    """The node of `job` in the process at `place` (host, port)."""
    return cast(NodePort, RemoteNode(index, place, key, config, job))


class ReportsThere:
    """`Reports` of another host, through its rollout node."""

    def __init__(self, node: Callable[[], object]) -> None:
        """`node()` returns the host's RemoteNode."""
        self._node = cast(Callable[[], RemoteNode], node)

    async def make(self) -> str:
        return cast(str, await self._asked(MAKE))

    async def take(self, directory: str) -> dict[int, bytes]:
        return cast(dict[int, bytes], await self._asked(TAKE, directory))

    async def claim(self, url: str, who: str) -> str:
        return cast(str, await self._node().ask(CLAIM, (url, who)))

    async def release(self, url: str) -> None:
        await self._node().ask(RELEASE, (url,))

    async def _asked(self, method: str, *arguments: str) -> object:
        try:
            return await self._node().ask(method, arguments)
        except TransportError as exc:
            raise ActivationError(f"the answers of SGLang's ranks cannot be fetched: {exc.message}") from exc
