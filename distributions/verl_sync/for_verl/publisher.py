"""`WeightPublisher` for the actor ranks of PyPI's verl: its replicas are the vLLM servers that verl has started.

Every rank makes one, and pushes. A server is spoken to by the rank that verl has put beside it; what rank 0 decides
travels as any call of a sync does.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, TypeVar

import torch.distributed as dist

from ..config import CheckpointEngineConfig
from ..errors import ConfigError
from ..publisher.hosts import HERE
from ..publisher.model_source import ModelSource
from ..publisher.publisher import CheckedReplica, WeightPublisher
from ..publisher.ranks import PublishingRank, Ranks
from .published import host_id

T = TypeVar("T")
Tensors = Mapping[str, tuple[str, tuple[int, ...]]]


class Server(Protocol):
    """The vLLM server beside a rank. All methods raise CheckpointEngineError."""

    async def check(self, tensors: Tensors) -> None: ...
    async def pause(self) -> None: ...
    async def activate(self, arena_path: str, version: int) -> None: ...
    async def resume(self) -> None: ...
    async def health(self) -> None: ...


class VerlPublisher(WeightPublisher):
    """Of one actor rank. Made by all of them at once, on the thread that trains."""

    def __init__(
        self, source: ModelSource, server: Server | None, *, config: Mapping[str, Any], report_path: Path | None
    ) -> None:
        """`server`: None where verl has none beside this rank. Raises ConfigError for one on another host than rank 0,
        and on every rank."""
        self._server = server
        self._ranks_with_server = ranks_with_server(everywhere((server is not None, host_id())))
        super().__init__(source, [], config=config, report_path=report_path)

    def _make_member(self, rank: int, settings: CheckpointEngineConfig) -> PublishingRank:
        return _RankWithServer(rank, self._source, settings, self._server)

    def _names(self) -> list[str]:
        return [*self._ranks_with_server]

    def _node_of(self, name: str) -> int:
        return HERE

    def _replica(self, name: str) -> CheckedReplica:
        return _Replica(name, self._ranks, self._ranks_with_server[name])


class _RankWithServer(PublishingRank):
    def __init__(
        self, index: int, source: ModelSource, settings: CheckpointEngineConfig, server: Server | None
    ) -> None:
        super().__init__(index, source, settings)
        self._server = server

    async def call_server(self, method: str, *arguments: Any) -> None:
        await getattr(self._server, method)(*arguments)


class _Replica:
    """Implements `ports.Replica`, on rank 0."""

    node_index, answers = HERE, True

    def __init__(self, name: str, ranks: Ranks, rank: int) -> None:
        self.name = name
        self._call: Callable[..., Awaitable[None]] = lambda *said: ranks.ask(rank, "call_server", said)

    async def check(self, tensors: Tensors) -> Mapping[str, str]:
        """What the server has no place for, it finds out when it loads."""
        await self._call("check", tensors)
        return {}

    async def claim(self) -> str:
        """A server of verl's is its job's alone: it listens to nobody else."""
        return self.name

    async def release(self) -> None: ...

    async def go_on(self, version: int) -> None:
        """verl's job ends with the push that failed, and its servers with it."""

    async def pause(self, mode: str) -> None:
        """`mode` is for requests under way, and there are none."""
        await self._call("pause")

    async def activate(self, arena_path: str, version: int) -> None:
        await self._call("activate", arena_path, version)

    async def resume(self) -> None:
        await self._call("resume")

    async def health(self) -> None:
        await self._call("health")

    async def sleep(self) -> None:
        """verl puts its servers to sleep, and wakes them; as below."""

    async def wake_up(self) -> None: ...

    async def release_kv_cache(self) -> None: ...

    async def resume_kv_cache(self) -> None: ...


def ranks_with_server(ranks: Sequence[tuple[bool, str]]) -> dict[str, int]:
    """Names of servers to ranks. `ranks`: whether each has a server, and on which host. Pure.

    Raises ConfigError if a server does not share the memory of rank 0.
    """
    with_server = [rank for rank, (has_server, _) in enumerate(ranks) if has_server]
    away = [str(rank) for rank in with_server if ranks[rank][1] != ranks[0][1]]
    if away:
        raise ConfigError(
            f"verl's vLLM servers beside the actor ranks {', '.join(away)} do not share the memory of rank 0: the "
            "rollout adapter of verl_sync is for one host. Take its configuration out, or train with verl-sync"
        )
    return {f"replica-{number}": rank for number, rank in enumerate(with_server)}


def everywhere(own: T) -> list[T]:
    """What each rank says. Every rank calls it, on the thread that trains."""
    found: list[Any] = [own]
    if dist.is_initialized():
        found = [None] * dist.get_world_size()
        dist.all_gather_object(found, own)
    return found
