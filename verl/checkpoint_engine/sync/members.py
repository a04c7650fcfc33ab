"""The members of a sync as the manager sees them, wherever they run: ports, and what their methods return.

What crosses processes is records, bytes and numbers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from inspect import iscoroutinefunction
from typing import Protocol

from ..plan.delta_choice import DeltaRequest, Encoded, Staging
from ..plan.member_report import Staged
from ..plan.topology import Topology
from ..plan.types import Member
from ..support.memory import MemoryUse


@dataclass(frozen=True, kw_only=True)
class Holding:
    """What one trainer rank says about itself: the whole model's layout, its own shards, its host."""

    host: str
    layout_digest: str
    layout: bytes
    """From rank 0 alone: the names of a large model are megabytes, and every rank has the same."""
    shards: bytes
    host_addresses: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Published:
    """What one trainer rank has published."""

    nbytes: int
    """Written."""
    seconds: float
    """For which its trainer waited, until it might change its weights."""
    digests: bytes
    """Of its pieces, in plan order."""
    encoded: Encoded | None = None
    """What it did with a `DeltaRequest`."""
    memory: MemoryUse | None = None
    """Of its process, while it copied."""


class MemberPort(Protocol):
    """Any member as the manager sees it, wherever it runs. All methods raise CheckpointEngineError."""

    @property
    def name(self) -> str: ...
    async def ping(self) -> None: ...
    async def connect(self, topology: Topology) -> None: ...
    async def close(self) -> None: ...


def methods_of(port: type) -> set[str]:
    """The names of what can be called on a member that is a `port`, from another process."""
    return {
        name
        for base in port.__mro__
        for name, value in vars(base).items()
        if iscoroutinefunction(value) and not name.startswith("_")
    }


class TrainerPort(MemberPort, Protocol):
    """A trainer rank as the manager sees it."""

    async def describe(self) -> Holding: ...
    async def prepare(self, plan: bytes) -> str: ...
    async def publish(
        self, version: int, slots: Mapping[str, str], waits: bool, deltas: DeltaRequest | None = None
    ) -> None: ...
    async def published(self, version: int) -> Published: ...
    async def serve(self, version: int) -> int: ...


class NodePort(MemberPort, Protocol):
    """A rollout node as the manager sees it."""

    async def check(self, arena_nbytes: int, arenas: int) -> None: ...
    async def prepare(self, plan: bytes) -> Member: ...
    async def begin(self, version: int) -> str: ...
    async def takes_deltas(self, base: int) -> bool: ...
    async def stage(self, version: int) -> Staged: ...
    async def staged(self, version: int) -> Staging: ...
    async def verify(self, version: int, digests: bytes) -> int: ...
    async def commit(self, version: int, digests: bytes) -> None: ...
    async def drop(self) -> None: ...
    async def rollback(self, version: int) -> int | None: ...
    async def reverify(self, version: int) -> None: ...
