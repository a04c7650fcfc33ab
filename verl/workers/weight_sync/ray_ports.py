"""Members of a sync that live in Ray actors, as the checkpoint engine's manager wants to see them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import Any

import ray
from ray.actor import ActorHandle
from ray.exceptions import RayActorError, RayError, RayTaskError

from verl.checkpoint_engine.config import CheckpointEngineConfig
from verl.checkpoint_engine.errors import CheckpointEngineError, TransportError
from verl.checkpoint_engine.participants import Holding, Published
from verl.checkpoint_engine.topology import Topology
from verl.checkpoint_engine.types import Member


class _RayMember:
    def __init__(self, name: str, handle: ActorHandle[Any]) -> None:
        self.name = name
        self._handle = handle

    async def _call(self, method: str, *arguments: Any) -> Any:
        """Await a remote method. Its own CheckpointEngineError comes through; a dead process is a TransportError."""
        reference = getattr(self._handle, method).remote(*arguments)
        try:
            return await reference
        except RayTaskError as exc:
            if isinstance(exc.cause, CheckpointEngineError):
                raise exc.cause from exc
            raise TransportError(f"{method} failed: {exc}", member=self.name) from exc
        except RayActorError as exc:
            raise TransportError(f"its process is gone: {str(exc).strip().splitlines()[0]}", member=self.name) from exc
        except RayError as exc:
            raise TransportError(f"{method} could not be called: {exc}", member=self.name) from exc
        except asyncio.CancelledError:
            ray.cancel(reference, force=False)
            raise


class RayTrainerRank(_RayMember):
    """A trainer rank in an actor worker; see `WeightPublisher` in `publisher.py` for the other end."""

    def __init__(self, rank: int, handle: ActorHandle[Any], config: CheckpointEngineConfig) -> None:
        super().__init__(f"trainer-{rank}", handle)
        self._config = config

    async def describe(self) -> Holding:
        result: Holding = await self._call("describe_weights", self._config)
        return result

    async def prepare(self, plan: bytes) -> str:
        result: str = await self._call("prepare_weight_sync", plan)
        return result

    async def connect(self, topology: Topology) -> None:
        await self._call("connect_weight_sync", topology)

    async def publish(self, version: int, slots: Mapping[str, str], waits: bool) -> None:
        await self._call("sync_rollout_weights_by_checkpoint", version, dict(slots), waits)

    async def published(self, version: int) -> Published:
        result: Published = await self._call("published_weight_sync", version)
        return result

    async def serve(self, version: int) -> int:
        result: int = await self._call("serve_weight_sync", version)
        return result

    async def close(self) -> None:
        await self._call("close_weight_sync")


class RayRolloutNode(_RayMember):
    """A rollout node in a `CheckpointEngineWorker`."""

    def __init__(self, index: int, start: Callable[[], ActorHandle[Any]]) -> None:
        """`start` starts its process, here and whenever another one shall take its place."""
        super().__init__(f"node-{index}", start())
        self._start = start

    def restart(self) -> None:
        """Another process takes its place. It holds no version until a sync has connected it and brought one."""
        self.kill()
        self._handle = self._start()

    def kill(self) -> None:
        """End the process now; its arena goes with it."""
        ray.kill(self._handle)

    async def answers(self, timeout_s: float) -> bool:
        """Whether the process is there and answers, which it does while it works."""
        try:
            await asyncio.wait_for(self._call("ping"), timeout_s)
        except (TransportError, TimeoutError):
            return False
        return True

    async def check(self, arena_nbytes: int, arenas: int) -> None:
        await self._call("check", arena_nbytes, arenas)

    async def prepare(self, plan: bytes) -> Member:
        result: Member = await self._call("prepare", plan)
        return result

    async def connect(self, topology: Topology) -> None:
        await self._call("connect", topology)

    async def begin(self, version: int) -> str:
        result: str = await self._call("begin", version)
        return result

    async def stage(self, version: int) -> int:
        result: int = await self._call("stage", version)
        return result

    async def verify(self, version: int, digests: bytes) -> int:
        result: int = await self._call("verify", version, digests)
        return result

    async def commit(self, version: int, digests: bytes) -> None:
        await self._call("commit", version, digests)

    async def drop(self) -> None:
        await self._call("drop")

    async def rollback(self, version: int) -> int | None:
        result: int | None = await self._call("rollback", version)
        return result

    async def reverify(self, version: int) -> None:
        await self._call("reverify", version)

    async def close(self) -> None:
        await self._call("close")
