"""The ports through which the manager calls trainer ranks and rollout nodes, and the records that they return.

Only records, bytes and numbers cross processes.
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
    """A trainer rank's description of itself: the whole model's layout, its own shards, its host."""

    host: str
    layout_digest: str
    layout: bytes
    """Only rank 0 fills it: the names of a large model are megabytes, the same on every rank."""
    shards: bytes
    host_addresses: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Published:
    """The result of one trainer rank's publish."""

    nbytes: int
    """Bytes written."""
    seconds: float
    """How long the copy kept its trainer from changing weights."""
    digests: bytes
    """Digests of its pieces, in plan order; 8 bytes each."""
    encoded: Encoded | None = None
    """How it answered a `DeltaRequest`."""
    memory: MemoryUse | None = None
    """Memory use of its process during the copy."""


class MemberPort(Protocol):
    """The manager's interface to any member, in any process. All methods raise CheckpointEngineError."""

    @property
    def name(self) -> str: ...
    async def ping(self) -> None: ...
    async def connect(self, topology: Topology) -> None: ...
    async def close(self) -> None: ...


def methods_of(port: type) -> set[str]:
    """The names of the public coroutine methods of `port`: those that another process may call."""
    return {
        name
        for base in port.__mro__
        for name, value in vars(base).items()
        if iscoroutinefunction(value) and not name.startswith("_")
    }


class TrainerPort(MemberPort, Protocol):
    """The manager's interface to a trainer rank; `trainer_rank.TrainerRank` implements it."""

    async def describe(self) -> Holding: ...
    async def prepare(self, plan: bytes) -> str: ...
    async def publish(
        self, version: int, slots: Mapping[str, str], waits: bool, deltas: DeltaRequest | None = None
    ) -> None: ...
    async def published(self, version: int) -> Published: ...
    async def serve(self, version: int) -> int: ...


class NodePort(MemberPort, Protocol):
    """The manager's interface to a rollout node; `rollout_node.RolloutNode` implements it."""

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
