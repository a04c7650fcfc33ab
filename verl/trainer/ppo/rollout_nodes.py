"""The rollout nodes of one run: a process each, which owns an arena; started again when it is lost."""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
from collections.abc import Sequence
from functools import partial
from typing import Any

from ray.actor import ActorHandle
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from verl import envs
from verl.checkpoint_engine.config import CheckpointEngineConfig
from verl.checkpoint_engine.deadline import all_within
from verl.workers.weight_sync.node import start_node
from verl.workers.weight_sync.ray_ports import RayRolloutNode

logger = logging.getLogger(__name__)

ANSWERS_WITHIN_S = 10.0
"""A node that does not say anything for so long is started again, after a sync has failed."""


class RolloutNodes:
    """Coroutines run on one event loop, that of the manager."""

    def __init__(
        self, config: CheckpointEngineConfig, *, machines: Sequence[str], hosts: Sequence[str], env_vars: dict[str, str]
    ) -> None:
        """Starts node i on the Ray node `machines[i]`, which is at the address `hosts[i]`; waits for none of them."""
        self._config = config
        self._hosts = hosts
        self._env_vars = env_vars
        self.ports = [RayRolloutNode(index, partial(self._start, index, name)) for index, name in enumerate(machines)]

    def _start(self, index: int, machine: str) -> ActorHandle[Any]:
        """Its arena has a name of its own: that of a node whose place it takes may be there for a moment yet."""
        job = f"{os.getpid()}-{secrets.token_hex(4)}"
        there = NodeAffinitySchedulingStrategy(machine, soft=False)
        options = {"scheduling_strategy": there, "runtime_env": {"env_vars": self._env_vars}}
        return start_node(index, self._config, job=job, shm_dir=envs.shm_dir(), options=options)

    async def check(self, arena_nbytes: int) -> None:
        """Raises ConfigError or BackendUnavailable for a machine that cannot do what is asked of its nodes."""
        checks = {
            port.name: port.check(arena_nbytes, self._hosts.count(host))
            for port, host in zip(self.ports, self._hosts, strict=True)
        }
        await all_within(self._config.deadlines.prepare_s, checks, version=None, phase="prepare")

    async def restart_lost(self) -> int:
        """Start those again that died or do not answer; how many. The next sync connects them and brings a version."""
        answers = await asyncio.gather(*(port.answers(ANSWERS_WITHIN_S) for port in self.ports))
        lost = [port for port, answered in zip(self.ports, answers, strict=True) if not answered]
        for port in lost:
            logger.warning("%s died or does not answer; starting it again", port.name)
            port.restart()
        return len(lost)

    def kill(self) -> None:
        """End their processes now; their arenas go with them."""
        for port in self.ports:
            port.kill()
