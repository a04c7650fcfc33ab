"""The process of `verl-sync node`: it runs one rollout node per connected publisher of another host."""

from __future__ import annotations

import asyncio
import logging
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec

from ..config import CheckpointEngineConfig
from ..errors import TransportError
from ..plan.encoded import unpacked
from ..sync.rollout_node import RolloutNode
from .node_link import HANDSHAKE_S, METHODS, OPEN, Answer, Call, Cancel, Failure, Link, let_in
from .reports import METHODS_BY_CALL, ReportsHere

logger = logging.getLogger(__name__)


async def serve(host: str, port: int, key: bytes, shm_dir: Path) -> None:
    """Serve publishers that have `key`, until this is cancelled. Raises OSError if the port is in use."""
    held: set[asyncio.Task[None]] = set()

    async def hold(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        held.add(task)
        try:
            await _hold(reader, writer, key, shm_dir)
        finally:
            held.discard(task)
            writer.close()

    server = await asyncio.start_server(hold, host, port)
    try:
        for each in server.sockets:
            logger.info("a rollout node for publishers that have the key: %s:%d", *each.getsockname()[:2])
        await asyncio.Event().wait()
    finally:
        server.close()
        for task in held:
            task.cancel()
        await asyncio.gather(*held, return_exceptions=True)


async def _hold(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, key: bytes, shm_dir: Path) -> None:
    peer = "{}:{}".format(*writer.get_extra_info("peername")[:2])
    try:
        async with asyncio.timeout(HANDSHAKE_S):
            link = await let_in(reader, writer, key)
    except (OSError, EOFError, TimeoutError, TransportError) as exc:
        logger.warning("%s was not let in: %s", peer, getattr(exc, "message", "it does not have the key"))
        return
    logger.info("publisher %s: connected", peer)
    held = HeldNode(link, shm_dir)
    try:
        await held.answer()
    except (OSError, EOFError):
        logger.info("publisher %s: gone", peer)
    except TransportError as exc:
        logger.warning("publisher %s: cut off, for it sent %s", peer, exc.message)
    finally:
        await held.close()


class HeldNode:
    """The rollout node of one publisher, and the reports of its SGLang servers."""

    def __init__(self, link: Link, shm_dir: Path) -> None:
        self._link, self._shm_dir = link, shm_dir
        self._node: RolloutNode | None = None
        self._reports = ReportsHere(shm_dir)
        self._tasks: dict[int, asyncio.Task[None]] = {}

    async def answer(self) -> None:
        """Answer calls, several at a time, until the publisher is gone. Raises as `Link.receive`."""
        while True:
            message = await self._link.receive()
            if isinstance(message, Cancel):
                if (task := self._tasks.get(message.number)) is not None:
                    task.cancel()
            elif isinstance(message, Call):
                self._tasks[message.number] = asyncio.create_task(self._do(message))

    async def _do(self, call: Call) -> None:
        answer: Answer | Failure
        try:
            value = await self._called(call)
            answer = Answer(call.number, msgspec.Raw(msgspec.msgpack.encode(value)))
        except Exception as exc:  # noqa: BLE001 - whatever it is, who called has to know
            answer = Failure.of(call.number, exc)
        finally:
            self._tasks.pop(call.number, None)
        with suppress(OSError):
            await self._link.send(answer)

    async def _called(self, call: Call) -> Any:
        signature = METHODS.get(call.method)
        if signature is None:
            raise TransportError(f"a rollout node has no {call.method}")
        arguments = unpacked(call.arguments, signature.arguments, f"what {call.method} takes")
        if call.method == OPEN:
            return self._open(*arguments)
        if call.method == "close":
            return await self._close_node()
        if call.method in METHODS_BY_CALL:
            return await getattr(self._reports, METHODS_BY_CALL[call.method])(*arguments)
        if self._node is None:
            raise TransportError("nothing has been opened")
        return await getattr(self._node, call.method)(*arguments)

    def _open(self, index: int, config: CheckpointEngineConfig, job: str) -> None:
        self._node = RolloutNode(index, config, job=job, shm_dir=self._shm_dir)

    async def close(self) -> None:
        """Cancel active calls, and remove the arena and the answers of ranks."""
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._close_node()

    async def _close_node(self) -> None:
        self._reports.close()
        if self._node is not None:
            node, self._node = self._node, None
            await node.close()
