"""The checkpoint engine's ports to members of a sync in Ray actors."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, TypeVar

import ray
from ray.actor import ActorHandle
from ray.exceptions import RayActorError, RayError, RayTaskError

from verl.checkpoint_engine.config import CheckpointEngineConfig
from verl.checkpoint_engine.errors import CheckpointEngineError, TransportError
from verl.checkpoint_engine.sync.members import Holding, NodePort, TrainerPort, methods_of

T = TypeVar("T")


class _RayMember:
    def __init__(self, name: str, handle: ActorHandle[Any]) -> None:
        self._name = name
        self._handle = handle

    @property
    def name(self) -> str:
        return self._name

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


def _calling(method: str) -> Callable[..., Awaitable[Any]]:
    async def call(self: _RayMember, *arguments: Any) -> Any:
        return await self._call(method, *arguments)

    call.__name__ = method
    return call


def remote(port: type, names: Mapping[str, str] | None = None) -> Callable[[type[T]], type[T]]:
    """Class decorator for a `_RayMember`: each method of `port` calls the actor's, by its name or `names[name]`.

    Methods that the class defines itself are kept.
    """

    def add(cls: type[T]) -> type[T]:
        for method in methods_of(port) - vars(cls).keys():
            setattr(cls, method, _calling((names or {}).get(method, method)))
        return cls

    return add


@remote(
    TrainerPort,
    {
        "ping": "_verl_ping",
        "prepare": "prepare_weight_sync",
        "connect": "connect_weight_sync",
        "publish": "sync_rollout_weights_by_checkpoint",
        "published": "published_weight_sync",
        "serve": "serve_weight_sync",
        "close": "close_weight_sync",
    },
)
class RayTrainerRank(_RayMember, TrainerPort):
    """A trainer rank in an actor worker; see `WeightPublisher` in `publisher.py` for the other end."""

    def __init__(self, rank: int, handle: ActorHandle[Any], config: CheckpointEngineConfig) -> None:
        super().__init__(f"trainer-{rank}", handle)
        self._config = config

    async def describe(self) -> Holding:
        result: Holding = await self._call("describe_weights", self._config)
        return result


@remote(NodePort)
class RayRolloutNode(_RayMember, NodePort):
    """A rollout node in a `CheckpointEngineWorker`."""

    def __init__(self, index: int, start: Callable[[], ActorHandle[Any]]) -> None:
        """`start` starts the node's process, now and at each `restart`."""
        super().__init__(f"node-{index}", start())
        self._start = start

    def restart(self) -> None:
        """Replace the process by a new one, which holds no version until a sync has brought one."""
        self.kill()
        self._handle = self._start()

    def kill(self) -> None:
        """Kill the process now; its arena is removed."""
        ray.kill(self._handle)

    async def answers(self, timeout_s: float) -> bool:
        """Whether the process lives and answers, which it does even while it works."""
        try:
            await asyncio.wait_for(self.ping(), timeout_s)
        except (TransportError, TimeoutError):
            return False
        return True
