"""Moves the rollout nodes and replicas of a lost machine to another one, or removes them from the run."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence

from verl.checkpoint_engine.errors import CheckpointEngineError
from verl.checkpoint_engine.sync.manager import CheckpointEngineManager
from verl.trainer.fleet.nodes import RolloutNodes
from verl.trainer.fleet.placement import Machine, other_machines
from verl.trainer.fleet.replicas import ReplicaPool
from verl.workers.config import PPOConfig

logger = logging.getLogger(__name__)

LOOKS_EVERY_S = 2.0


class LostMachines:
    """Handles lost machines of one run. Coroutines run on the manager's event loop."""

    def __init__(
        self,
        config: PPOConfig,
        device: str,
        *,
        machines: Callable[[], Mapping[str, Machine]],
        trainer_nodes: Callable[[], Collection[str]],
        nodes: Callable[[], RolloutNodes],
        pool: ReplicaPool,
        manager: Callable[[], CheckpointEngineManager],
    ) -> None:
        """`machines()` returns Ray's present machines by id, `trainer_nodes()` the ids of those with trainer ranks.
        `nodes()` and `manager()` return the current ones."""
        self._config, self._device = config, device
        self._machines, self._trainer_nodes = machines, trainer_nodes
        self._nodes, self._pool, self._manager = nodes, pool, manager

    async def leave(self) -> int:
        """Move or remove the rollout nodes and replicas of machines that Ray has lost; returns their number.
        `ReplicaPool.heal` then starts moved replicas.

        If no machine is left for rollouts, waits `trainer.restart_wait_s` for another one. Raises CheckpointEngineError
        if none joins.
        """
        nodes = self._nodes()
        alive = self._machines()
        lost = [index for index, machine in nodes.machines.items() if machine not in alive]
        if not lost:
            return 0
        addresses = {index: nodes.hosts[index] for index in lost}
        going, hosts = await self._others(lost)
        names = await self._move(going, hosts, addresses) if going else []
        left = [index for index in lost if nodes.machines[index] not in self._machines()]
        return len(names) + await self._give_up(left)

    async def _others(self, lost: Sequence[int]) -> tuple[dict[int, str], dict[int, str]]:
        """The machine to which each rollout node goes, as far as there is one, and its address."""
        nodes, wait_s = self._nodes(), self._config.trainer.restart_wait_s
        remaining = {machine for index, machine in nodes.machines.items() if index not in lost}
        replicas = Counter({nodes.machines[index]: 0 for index in lost})
        replicas.update(nodes.machines[one.node_index] for one in self._pool.replicas if one.node_index in lost)
        deadline = time.monotonic() + wait_s
        while True:
            alive = self._machines()
            others = other_machines(
                self._config,
                self._device,
                replicas,
                rollout_nodes=remaining,
                trainer_nodes=self._trainer_nodes(),
                machines=alive,
            )
            if others or remaining or time.monotonic() >= deadline or self._config.trainer.placement == "colocated":
                going = {index: others[nodes.machines[index]] for index in lost if nodes.machines[index] in others}
                return going, {index: alive[machine].address for index, machine in going.items()}
            if wait_s:
                logger.warning("no machine is left for rollouts: waiting %g s for one (trainer.restart_wait_s)", wait_s)
                wait_s = 0.0
            await asyncio.sleep(LOOKS_EVERY_S)

    async def _move(
        self, going: Mapping[int, str], hosts: Mapping[int, str], addresses: Mapping[int, str]
    ) -> list[str]:
        """Names of rollout nodes and replicas that go on elsewhere. `addresses` are those of the machines before."""
        nodes = self._nodes()
        before = dict(nodes.machines)
        failures = await nodes.move(going, hosts)
        for index, error in failures.items():
            logger.warning("%s cannot be on %s: %s", nodes.port(index).name, nodes.hosts[index], error)
            nodes.machines[index], nodes.hosts[index] = before[index], addresses[index]
        moved = {index: machine for index, machine in going.items() if index not in failures}
        replicas = await self._pool.move(moved)
        ports = [nodes.port(index) for index in moved]
        if moved and self._manager().late_nodes:
            try:
                await self._manager().add_nodes(ports)
            except CheckpointEngineError as exc:
                logger.info("rollout nodes on other machines get a version with the next sync: %s", exc)
        names = [*(port.name for port in ports), *replicas]
        if names:
            gone = ", ".join(sorted({addresses[index] for index in moved}))
            there = ", ".join(sorted({nodes.hosts[index] for index in moved}))
            logger.warning("%s is lost; %s go on on %s", gone, ", ".join(names), there)
        return names

    async def _give_up(self, left: Sequence[int]) -> int:
        nodes = self._nodes()
        addresses = ", ".join(sorted({nodes.hosts[index] for index in left}))
        if len(left) == len(nodes.machines):
            raise CheckpointEngineError(f"every machine with a rollout node is lost: {addresses}")
        replicas = await self._pool.give_up(left)
        given_up = nodes.give_up(left)
        await self._manager().remove_nodes(given_up)  # or none: the next sync connects anew, to those that moved
        names = [*(node.name for node in given_up), *replicas]
        if names:
            logger.warning("%s is lost; the run goes on without %s", addresses, ", ".join(names))
        return len(names)
