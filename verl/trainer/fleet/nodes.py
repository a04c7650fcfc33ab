"""The rollout nodes of one run: each is a process that owns an arena, restarted when it is lost."""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
from collections import Counter
from collections.abc import Collection, Mapping
from functools import partial
from typing import Any

from ray.actor import ActorHandle
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from verl.checkpoint_engine.config import CheckpointEngineConfig
from verl.checkpoint_engine.errors import CheckpointEngineError
from verl.checkpoint_engine.support import envs
from verl.checkpoint_engine.sync.deadline import all_within, each_within
from verl.workers.weight_sync.node import start_node
from verl.workers.weight_sync.ray_ports import RayRolloutNode

logger = logging.getLogger(__name__)

ANSWERS_WITHIN_S = 10.0
"""After a failed sync, a node that does not answer within this time is restarted."""
STARTS_WITHIN_S = 120.0
"""A start takes seconds, but Ray needs a minute to notice a machine that does not answer."""


class RolloutNodes:
    """Starts, moves and ends the rollout nodes. Coroutines run on the manager's event loop."""

    def __init__(
        self,
        config: CheckpointEngineConfig,
        *,
        machines: Mapping[int, str],
        hosts: Mapping[int, str],
        env_vars: dict[str, str],
    ) -> None:
        """Starts node i on the Ray node `machines[i]`, at the address `hosts[i]`; does not wait for them."""
        self._config = config
        self.machines, self.hosts = dict(machines), dict(hosts)
        """Ray's id of each node's machine, and its address; by index."""
        self._env_vars = env_vars
        self._arena_nbytes = 0
        self._ports = {
            index: RayRolloutNode(index, partial(self._start, index))  # type: ignore[abstract] # see `remote`
            for index in machines
        }

    @property
    def ports(self) -> list[RayRolloutNode]:
        return list(self._ports.values())

    def port(self, index: int) -> RayRolloutNode:
        return self._ports[index]

    def _start(self, index: int) -> ActorHandle[Any]:
        """Its arena has a name of its own: that of a node whose place it takes may be there for a moment yet."""
        job = f"{os.getpid()}-{secrets.token_hex(4)}"
        there = NodeAffinitySchedulingStrategy(self.machines[index], soft=False)
        options = {"scheduling_strategy": there, "runtime_env": {"env_vars": self._env_vars}}
        return start_node(index, self._config, job=job, shm_dir=envs.shm_dir(), options=options)

    async def check(self, arena_nbytes: int) -> None:
        """Raises ConfigError or BackendUnavailable if a node's machine lacks the shared memory or the backend."""
        self._arena_nbytes = arena_nbytes
        checks = {port.name: self._check(index) for index, port in self._ports.items()}
        await all_within(self._config.deadlines.prepare_s, checks, version=None, phase="prepare")

    async def _check(self, index: int) -> None:
        arenas = Counter(self.hosts.values())
        await self._ports[index].check(self._arena_nbytes, arenas[self.hosts[index]])

    async def move(self, machines: Mapping[int, str], hosts: Mapping[int, str]) -> dict[int, CheckpointEngineError]:
        """Start these nodes on other machines; returns errors of those that do not fit. The next sync brings a version.

        Waits until they run.
        """
        self.machines |= machines
        self.hosts |= hosts
        for index in machines:
            self._ports[index].restart()
        checks = {self._ports[index].name: self._check(index) for index in machines}
        failures = await each_within(STARTS_WITHIN_S, checks, version=None, phase="prepare")
        return {index: failures[name] for index, name in zip(machines, checks, strict=True) if name in failures}

    async def restart_lost(self) -> int:
        """Restart nodes that died or do not answer; returns their number. The next sync gives them a version.

        Waits until they run, or Ray reports their machine as lost.
        """
        answers = await asyncio.gather(*(port.answers(ANSWERS_WITHIN_S) for port in self.ports))
        lost = [port for port, answered in zip(self.ports, answers, strict=True) if not answered]
        for port in lost:
            logger.warning("%s died or does not answer; starting it again", port.name)
            port.restart()
        await asyncio.gather(*(port.answers(STARTS_WITHIN_S) for port in lost))
        return len(lost)

    def give_up(self, indices: Collection[int]) -> list[RayRolloutNode]:
        """Remove nodes from the run and kill them; returns their ports."""
        ports = [self._ports.pop(index) for index in indices]
        for index, port in zip(indices, ports, strict=True):
            del self.machines[index], self.hosts[index]
            port.kill()
        return ports

    def kill(self) -> None:
        """Kill all nodes; their arenas are removed with them."""
        for port in self.ports:
            port.kill()
