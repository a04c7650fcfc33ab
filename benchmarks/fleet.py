"""Trainer ranks, rollout nodes and their manager, on this host or on hosts of their own: the harness of all syncs."""

from __future__ import annotations

import asyncio
import itertools
import os
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch

from benchmarks.machine import private_nbytes
from benchmarks.namespaces import Host
from benchmarks.processes import Member
from verl.checkpoint_engine.config import CheckpointEngineConfig
from verl.checkpoint_engine.memory.publishing import publisher_environment
from verl.checkpoint_engine.ports import WeightSource
from verl.checkpoint_engine.support import envs
from verl.checkpoint_engine.sync.manager import CheckpointEngineManager
from verl.checkpoint_engine.sync.rollout_node import RolloutNode
from verl.checkpoint_engine.sync.trainer_rank import TrainerRank

_counter = itertools.count()


class SteppingSource(WeightSource, Protocol):
    """What a rank holds. Its further methods can be called from outside, too; they run one after the other."""

    def step(self) -> None:
        """Change every weight."""


class Rank:
    """In its process: the methods of a trainer rank, and of the source that it has."""

    def __init__(self, rank: int, make_source: Callable[[], SteppingSource], config: CheckpointEngineConfig) -> None:
        torch.set_num_threads(1)
        self._source = make_source()
        self._trainer = TrainerRank(rank, self._source, config)

    def __getattr__(self, method: str) -> Any:
        return getattr(self._trainer if hasattr(self._trainer, method) else self._source, method)

    def step(self) -> None:
        self._trainer.await_copied()
        self._source.step()

    def private_nbytes(self) -> int:
        """Memory that belongs to the rank's process alone: not the arena that it may have mapped."""
        return private_nbytes()


@dataclass(frozen=True, kw_only=True)
class Fleet:
    job: str
    manager: CheckpointEngineManager
    ranks: list[Member]
    nodes: Sequence[Any]
    """`RolloutNode`, or a `Member` that has one."""

    async def of_ranks(self, method: str, *arguments: Any) -> list[Any]:
        """What each rank's method returns."""
        return await asyncio.gather(*(getattr(rank, method)(*arguments) for rank in self.ranks))


@asynccontextmanager
async def on_one_host(
    config: CheckpointEngineConfig, sources: Sequence[Callable[[], SteppingSource]], nodes: int, *, tuned: bool = True
) -> AsyncIterator[Fleet]:
    """A rank with each of `sources` in a process of its own, and nodes in this one. All end with the block.

    `tuned`: ranks have the environment that trainer ranks get, which takes processes that import all for themselves.
    """
    job = f"benchmark-{os.getpid()}-{next(_counter)}"
    made = [RolloutNode(index, config, job=job, shm_dir=envs.shm_dir()) for index in range(nodes)]
    async with _joined(job, config, _ranks(config, sources, None, tuned), made) as fleet:
        yield fleet


@asynccontextmanager
async def on_hosts(
    config: CheckpointEngineConfig, sources: Sequence[Callable[[], SteppingSource]], hosts: Sequence[Host | None]
) -> AsyncIterator[Fleet]:
    """Ranks at the first of `hosts` and a node at each of the others, where None is this one."""
    job = f"benchmark-{os.getpid()}-{next(_counter)}"
    nodes = [node_process(index, config, job=job, host=host) for index, host in enumerate(hosts[1:])]
    async with _joined(job, config, _ranks(config, sources, hosts[0], True), nodes) as fleet:
        yield fleet


def node_process(
    index: int, config: CheckpointEngineConfig, *, job: str, host: Host | None = None, shm_dir: Any = None
) -> Member:
    """A rollout node in a process of its own, a `NodePort`."""
    make = partial(RolloutNode, index, config, job=job, shm_dir=shm_dir or envs.shm_dir())
    return Member(f"node-{index}", make, host=host)


def _ranks(
    config: CheckpointEngineConfig, sources: Sequence[Callable[[], SteppingSource]], host: Host | None, tuned: bool
) -> list[Member]:
    environment = publisher_environment() if tuned else None
    return [
        Member(f"trainer-{rank}", partial(Rank, rank, source, config), host=host, environment=environment)
        for rank, source in enumerate(sources)
    ]


@asynccontextmanager
async def _joined(
    job: str, config: CheckpointEngineConfig, ranks: list[Member], nodes: Sequence[Any]
) -> AsyncIterator[Fleet]:
    manager = CheckpointEngineManager(config=config, trainers=ranks, nodes=nodes)
    try:
        yield Fleet(job=job, manager=manager, ranks=ranks, nodes=nodes)
    finally:
        await manager.close()
        for member in (*ranks, *nodes):
            if isinstance(member, Member):
                await asyncio.to_thread(member.end)
