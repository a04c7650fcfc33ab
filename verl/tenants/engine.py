"""The port of an engine that samples with many adapters of one model at once, and which of them it holds."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Protocol

from verl.tenants.base import Shape
from verl.tenants.checkpoints import Version


class EngineDied(Exception):
    """The engine computes no more, and another one is to be started."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Drawing:
    """How one sequence is drawn. `likeliest`: how many tokens are told at each place; `stream`: token by token."""

    max_tokens: int
    temperature: float
    top_k: int
    top_p: float
    seed: int | None
    stop_tokens: Sequence[int]
    likeliest: int
    stream: bool


@dataclass(frozen=True, slots=True)
class Drawn:
    """A token with its log-prob before temperature, top-k and top-p, and the likeliest tokens with theirs."""

    token: int
    logprob: float
    likeliest: Sequence[tuple[int, float]] = ()


class Engine(Protocol):
    """Its methods are called on one event loop. After EngineDied only `close` is called."""

    slots: int
    """How many adapters it holds at once."""

    async def check(self) -> None:
        """Called first: find out what it can compute."""

    def require(self, shape: Shape) -> None:
        """Raises Refused, with the layers, for adapters of a shape that it cannot compute."""

    async def load(self, version: Version) -> None:
        """Hold `version` under its digest; there is a slot for it.

        Raises Refused if its files have changed, IntegrityError if the engine then computes with other tensors, and
        EngineDied. In all cases it does not hold the version afterwards.
        """

    async def unload(self, digest: str) -> None:
        """Raises EngineDied."""

    def draw(
        self, prompt: Sequence[int], drawing: Drawing, digest: str | None
    ) -> AsyncGenerator[Sequence[Drawn], None]:
        """The sequence, in one part or in several, by the version that it holds under `digest`, or by the base model.

        Closing the generator ends the request. Raises Refused for what it cannot draw so, and EngineDied.
        """

    def close(self) -> None:
        """End its processes. May be called again."""


class Slots:
    """Which versions an engine holds. One stays while samples use it; of the others the longest unused makes room."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._users: OrderedDict[str, int] = OrderedDict()
        """By digest."""
        self._turn = asyncio.Lock()
        self._freed = asyncio.Event()

    @asynccontextmanager
    async def holding(self, version: Version | None) -> AsyncIterator[str | None]:
        """The digest under which the engine holds `version` until the block ends. Waits, in turn, for a free slot."""
        if version is None:
            yield None
            return
        digest = version.digest
        async with self._turn:
            await self._hold(version)
            self._users[digest] += 1
            self._users.move_to_end(digest)
        try:
            yield digest
        finally:
            self._users[digest] -= 1
            self._freed.set()

    async def prepare(self, version: Version) -> None:
        """Load a version that may be asked for soon, if one that is unused can make room."""
        async with self._turn:
            if version.digest not in self._users and (
                len(self._users) < self._engine.slots or not all(self._users.values())
            ):
                await self._hold(version)

    async def _hold(self, version: Version) -> None:
        while version.digest not in self._users and len(self._users) >= self._engine.slots:
            unused = next((digest for digest, users in self._users.items() if not users), None)
            if unused is None:
                self._freed.clear()
                await self._freed.wait()
            else:
                await self._engine.unload(unused)
                del self._users[unused]
        if version.digest not in self._users:
            await self._engine.load(version)
            self._users[version.digest] = 0
