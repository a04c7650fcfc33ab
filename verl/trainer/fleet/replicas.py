"""The rollout replicas of one run: restarted when they die, added and removed during the run."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import ray

from verl.checkpoint_engine.errors import CheckpointEngineError
from verl.checkpoint_engine.sync.manager import CheckpointEngineManager
from verl.trainer.fleet.counts import num_replicas
from verl.trainer.fleet.placement import place_another
from verl.utils.config import ConfigError
from verl.workers.config import PPOConfig
from verl.workers.rollout import Placement, RolloutReplica, RolloutReplicaRegistry
from verl.workers.rollout.errors import ReplicaTimeout, RolloutError
from verl.workers.rollout.registry import require_rollout

logger = logging.getLogger(__name__)

FAILURES = (CheckpointEngineError, RolloutError, ConfigError, ray.exceptions.RayError)
"""Errors of a replica's start that do not end the run."""


class ReplicaPool:
    """Coroutines run on one event loop, that of the manager; attributes may be read from other threads.

    A replica that is added launches its engine, registers itself with the manager, which loads the version in service
    into it, and only then becomes one of `replicas`. One that is removed finishes what it generates and ends.
    """

    def __init__(
        self,
        replicas: Sequence[RolloutReplica],
        *,
        make: Callable[[int], RolloutReplica],
        launch: Callable[[RolloutReplica, Placement], Awaitable[None]],
        manager: Callable[[], CheckpointEngineManager],
    ) -> None:
        """`make(rank)` returns a replica, not started; `launch` starts it; `manager()` returns the current manager."""
        self.replicas = list(replicas)
        self.restarts = 0
        """Replicas that were restarted because they died or left service."""
        self._make = make
        self._launch = launch
        self._manager = manager
        self._joining: dict[RolloutReplica, Placement] = {}
        self._leaving: list[RolloutReplica] = []
        self._tasks: dict[RolloutReplica, asyncio.Task[None]] = {}

    @property
    def everyone(self) -> list[RolloutReplica]:
        """All replicas that may have a process."""
        return [*self.replicas, *self._joining, *self._leaving]

    async def resize(self, count: int, nodes: Mapping[int, str]) -> None:
        """Start changing the number of replicas to `count`; no wait for engines. `nodes` is as in `place_another`.

        A replica that cannot be started is logged and left out. Raises ValueError for a count below 1.
        """
        if count < 1:
            raise ValueError(f"a run needs at least one rollout replica, not {count}")
        present = [*self.replicas, *self._joining]
        for replica in reversed(present[count:]):
            logger.info("%s is removed", replica.name)
            if replica in self._joining:
                self._tasks[replica].cancel()
            else:
                self.replicas = [other for other in self.replicas if other is not replica]
                self._leaving.append(replica)
                self._begin(replica, self._remove(replica))
        for _ in range(count - len(present)):
            places = [replica.placement for replica in self.replicas] + list(self._joining.values())
            replica = self._make(self._unused_rank())
            self._joining[replica] = place_another(nodes, places)
            logger.info("%s is added", replica.name)
            self._begin(replica, self._add(replica))

    async def heal(self) -> int:
        """Restart replicas that died or are quarantined; returns how many are back in service."""
        quarantined = {replica.name for replica in self._manager().quarantined}
        deaths = await asyncio.gather(*map(_death_of, self.replicas))
        broken = [
            (replica, death or f"{replica.name} does not serve the current weights")
            for replica, death in zip(self.replicas, deaths, strict=True)
            if death or replica.name in quarantined
        ]
        healed = sum(await asyncio.gather(*(self._restart(replica, why) for replica, why in broken)))
        self.restarts += healed
        return healed

    async def move(self, machines: Mapping[int, str]) -> list[str]:
        """Have `heal` restart the replicas of these rollout nodes on other machines; returns their names.

        Replicas that are still joining leave the run.
        """
        await self._give_up([replica for replica, place in self._joining.items() if place.node_index in machines])
        moved = [replica for replica in self.replicas if replica.node_index in machines]
        await self._manager().remove_replicas(moved)
        for replica in moved:
            replica.kill()
            replica.placement = replace(replica.placement, node_id=machines[replica.node_index])
        return [replica.name for replica in moved]

    async def give_up(self, nodes: Collection[int]) -> list[str]:
        """Remove the replicas of the rollout nodes `nodes` from the run, in any state; returns their names."""
        lost = [replica for replica in self.replicas if replica.node_index in nodes]
        lost += [replica for replica, place in self._joining.items() if place.node_index in nodes]
        return await self._give_up(lost)

    async def _give_up(self, lost: Sequence[RolloutReplica]) -> list[str]:
        for replica in lost:
            if replica in self._joining:
                self._tasks[replica].cancel()
            replica.kill()
        self.replicas = [replica for replica in self.replicas if replica not in lost]
        await self._manager().remove_replicas(lost)
        return [replica.name for replica in lost]

    async def shutdown(self) -> None:
        """End every engine in order."""
        for task in self._tasks.values():
            task.cancel()
        await asyncio.gather(*self._tasks.values(), return_exceptions=True)
        await asyncio.gather(*(replica.shutdown() for replica in self.everyone))

    def _begin(self, replica: RolloutReplica, work: Awaitable[None]) -> None:
        task = self._tasks[replica] = asyncio.ensure_future(work)

        def ended(_: asyncio.Task[None]) -> None:
            del self._tasks[replica]
            self._joining.pop(replica, None)  # one that was cancelled before it began has not done so itself

        task.add_done_callback(ended)

    def _unused_rank(self) -> int:
        used = {replica.replica_rank for replica in self.everyone}
        return next(rank for rank in range(len(used) + 1) if rank not in used)

    async def _add(self, replica: RolloutReplica) -> None:
        manager, added = self._manager(), False
        try:
            await self._launch(replica, self._joining[replica])
            await manager.add_replicas([replica])
            added = True
        except FAILURES as exc:
            logger.error("%s could not be added; the run goes on without it: %s", replica.name, exc)  # noqa: TRY400 - told in one line
        finally:
            self._joining.pop(replica)
            if not added:
                replica.kill()
                await manager.remove_replicas([replica])
        if added:
            self.replicas = [*self.replicas, replica]
            logger.info("%s is in service", replica.name)

    async def _remove(self, replica: RolloutReplica) -> None:
        try:
            await self._manager().remove_replicas([replica])
            await replica.pause("wait")
            await replica.shutdown()
        except FAILURES as exc:
            logger.warning("%s is killed: %s", replica.name, exc)
        finally:
            replica.kill()
            self._leaving.remove(replica)

    async def _restart(self, replica: RolloutReplica, why: str) -> bool:
        logger.warning("%s; %s is started again", why, replica.name)
        await self._manager().remove_replicas([replica])
        try:
            await replica.launch_servers()
            await self._manager().add_replicas([replica])
        except FAILURES as exc:
            logger.error("%s could not be restarted: %s", replica.name, exc)  # noqa: TRY400 - told in one line
            return False
        logger.warning("%s is in service again", replica.name)
        return True


async def _death_of(replica: RolloutReplica) -> str | None:
    """What there is to say of it, in a line; None of one that lives."""
    try:
        await replica.health()
    except ReplicaTimeout:  # busy
        return None
    except RolloutError as exc:
        return (str(exc).splitlines() or [f"{replica.name} died"])[0]
    return None


def make_replicas(config: PPOConfig, *, model_path: Path, device: str) -> list[RolloutReplica]:
    """The replicas of a run with a `settled` configuration, not started.

    Raises ConfigError for what their engine does not support, or lacks if it is one of the user's.
    """
    require_rollout(config.actor_rollout_ref.rollout.name)
    return [
        make_replica(config, rank, model_path=model_path, device=device) for rank in range(num_replicas(config, device))
    ]


def make_replica(config: PPOConfig, rank: int, *, model_path: Path, device: str) -> RolloutReplica:
    """One replica of a run, not started."""
    policy = config.actor_rollout_ref
    return RolloutReplicaRegistry.get(policy.rollout.name)(
        replica_rank=rank, config=policy.rollout, model=policy.model.at(model_path), device=device
    )
