"""The base of trainer ranks and rollout nodes, in the process that has their memory: a backend engine and a thread.

Blocking work runs on that one named thread, so the event loop of the process stays responsive.
"""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from ..config import CheckpointEngineConfig
from ..errors import TransportError
from ..plan.topology import Topology
from ..plan.types import Member
from ..registry import resolve_backend
from ..support.network import host_addresses

T = TypeVar("T")


class Participant:
    def __init__(self, role: str, index: int, config: CheckpointEngineConfig, host: str | None) -> None:
        self._config = config
        self._member = Member(
            role=role, index=index, host=host or socket.gethostname(), host_addresses=host_addresses()
        )
        self._engine = resolve_backend(config)(member=self._member, config=config)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix=f"weight-sync-{self.name}")
        self._interrupting = threading.Lock()

    @property
    def name(self) -> str:
        return self._member.name

    async def ping(self) -> None:
        """Return at once, even while the member's thread works."""

    async def connect(self, topology: Topology) -> None:
        await self._run_interruptibly(lambda: self._engine.init_process_group(topology))

    async def _run_interruptibly(self, work: Callable[[], T]) -> T:
        """Like `_run`; the thread is free again soon after this is cancelled, and work not yet begun never begins."""
        state = {"running": False, "cancelled": False}

        def unless_cancelled() -> T:
            with self._interrupting:
                if state["cancelled"]:
                    raise TransportError("given up by the manager", member=self.name)
                self._engine.rearm()
                state["running"] = True
            try:
                return work()
            finally:
                with self._interrupting:
                    state["running"] = False

        try:
            return await self._run(unless_cancelled)
        except asyncio.CancelledError:
            with self._interrupting:
                state["cancelled"] = True
                if state["running"]:
                    self._engine.interrupt()
            raise

    async def _run(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._thread, work)
