"""`naive` on two hosts, each with trainer ranks and rollout nodes: pieces of ranks elsewhere come through a relay."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.namespaces import NotPermitted, joined_hosts
from tests.checkpoint_engine.fakes import (
    ColumnShardedSource,
    Fleet,
    RecordingReplica,
    RowShardedSource,
    arenas_in,
    later,
)
from tests.checkpoint_engine.member_processes import MemberProcess, Source, Spoil, SpoiledCommunicator, weights
from verl.checkpoint_engine.config import CheckpointEngineConfig
from verl.checkpoint_engine.errors import (
    BackendUnavailable,
    CheckpointEngineError,
    IntegrityError,
    SyncAborted,
    TransportError,
    TransportTimeout,
)
from verl.checkpoint_engine.sync.manager import CheckpointEngineManager
from verl.checkpoint_engine.sync.rollout_node import RolloutNode
from verl.checkpoint_engine.sync.trainer_rank import TrainerRank

FAR_S, NEAR_S = 300.0, 15.0
"""A death is noticed long before, a stall at the deadline."""
MODEL = {
    "w": torch.randn(7, 5),
    "large": torch.randn(1001, 515),
    "norm": torch.randn(3),
    "five": torch.randn(5, 2).bfloat16(),
    "scale": torch.randn(()),
    "empty": torch.randn(0, 4),
} | {f"bias{layer}": torch.randn(33) for layer in range(100)}


@pytest.mark.parametrize("source", [RowShardedSource, ColumnShardedSource])
@pytest.mark.parametrize("hosts", [("ab", "ab"), ("aab", "ab"), ("aabb", "ab"), ("abab", "aabb"), ("abc", "cab")])
async def test_every_node_of_every_host_gets_every_byte(
    hosts: tuple[str, str], source: type[RowShardedSource], tmp_path: Path
) -> None:
    trainers, nodes = map(len, hosts)
    async with Fleet(
        MODEL,
        tmp_path,
        trainers=trainers,
        nodes=nodes,
        replicas=nodes,
        hosts=hosts,
        source=source,
        update_weights_bucket_megabytes=1,
        retries=0,
    ) as fleet:
        async for _, report in fleet.three_versions(later(MODEL)):
            assert report.nbytes_moved == report.nbytes_needed == nodes * sum(t.nbytes for t in MODEL.values())
    assert not arenas_in(tmp_path)


async def test_the_trainer_may_change_its_weights_as_soon_as_they_are_in_its_own_hosts_slot(tmp_path: Path) -> None:
    tensors = {"w": torch.randn(300_000, 3)}
    async with Fleet(tensors, tmp_path, nodes=2, replicas=2, hosts=("ab", "ab"), retries=0) as fleet:
        published = tensors["w"].clone()
        fleet.trainers[0].before["serve"] = lambda: tensors["w"].fill_(float("nan"))
        await fleet.manager.update_weights(1)
        assert tensors["w"].isnan().all()
        assert all(torch.equal(replica.weights["w"], published) for replica in fleet.replicas)


async def test_a_rank_that_sends_another_version_is_refused_before_a_byte_lands(tmp_path: Path) -> None:
    async with Fleet({"w": torch.randn(8, 8)}, tmp_path, nodes=2, hosts=("ab", "ab"), retries=0) as fleet:
        await fleet.manager.update_weights(1)
        engine = fleet.trainers[1].member._engine
        exchange = engine._relay.exchange
        engine._relay.exchange = lambda version, slots: exchange(1, slots)
        stale = "trainer-1 sends version 1 where version 2 is expected"
        same_to_the_other = "trainer-0 sends version 2 where version 1 is expected"
        with pytest.raises(SyncAborted, match=f"{stale}|{same_to_the_other}"):
            await fleet.manager.update_weights(2)
        await fleet.manager.update_weights(3)
        assert fleet.replicas[0].version == 3


async def test_a_host_with_a_node_but_no_trainer_rank_is_named(tmp_path: Path) -> None:
    async with Fleet({"w": torch.randn(8, 8)}, tmp_path, nodes=2, hosts=("aa", "ab")) as fleet:
        with pytest.raises(BackendUnavailable, match=r"these have only one of them: b\."):
            await fleet.manager.update_weights(1)


async def test_a_rank_that_is_not_connected_publishes_nothing(tmp_path: Path) -> None:
    async with Fleet({"w": torch.randn(8, 8)}, tmp_path, nodes=2, hosts=("ab", "ab"), retries=0) as fleet:
        await fleet.manager.update_weights(1)
        fleet.trainers[0].member._engine._here = frozenset()
        with pytest.raises(SyncAborted, match="trainer-0.*not connected to any node of this host"):
            await fleet.manager.update_weights(2)


# --- in processes -----------------------------------------------------------------------------------------------------


class Rank(TrainerRank):
    """`host` is a name, or a namespace to live in."""

    def __init__(self, index: int, config: CheckpointEngineConfig, host: Any) -> None:
        self.held = Source(weights(0), index, 2)
        super().__init__(index, self.held, config, host=_enter(host))
        self.spoil = Spoil()

    async def train(self, version: int) -> None:
        self.held.tensors = weights(version)

    async def connect(self, topology: Any) -> None:
        groups: Any = self._engine._relay._groups
        groups._communicator = SpoiledCommunicator(groups._communicator, self.spoil)
        await super().connect(topology)

    async def on_landing(self, number: int | None) -> None:
        """When a few messages have passed here, send signal `number` to this process; None: flip a bit of one."""
        self.spoil.arm(number, os.getpid())


class Node(RolloutNode):
    def __init__(self, index: int, config: CheckpointEngineConfig, shm_dir: Path, host: Any) -> None:
        super().__init__(index, config, job="test", shm_dir=shm_dir, host=_enter(host))


def _enter(host: Any) -> str | None:
    if isinstance(host, str):
        return host
    host.enter()
    return None


class HostsFleet:
    """A trainer rank and a rollout node on each of two hosts, all in processes of their own."""

    def __init__(self, shm_dir: Path, hosts: tuple[Any, Any] = ("a", "b"), **config: Any) -> None:
        self.config = CheckpointEngineConfig.from_mapping({"update_weights_bucket_megabytes": 1, **config})
        self.hosts = hosts
        self.trainers = [self.start_trainer(index) for index in range(2)]
        self.nodes = [
            MemberProcess(f"node-{index}", Node, index, self.config, shm_dir, host) for index, host in enumerate(hosts)
        ]
        self.replicas = [RecordingReplica(f"replica-{index}", index) for index in range(2)]
        self.manager = CheckpointEngineManager(config=self.config, trainers=self.trainers, nodes=self.nodes)

    def start_trainer(self, index: int) -> MemberProcess:
        return MemberProcess(f"trainer-{index}", Rank, index, self.config, self.hosts[index])

    async def __aenter__(self) -> HostsFleet:
        await self.manager.add_replicas(self.replicas)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.manager.close()
        for member in (*self.trainers, *self.nodes):
            await member.end()

    async def sync(self, version: int) -> None:
        await asyncio.gather(*(trainer.train(version) for trainer in self.trainers))
        await self.manager.update_weights(version)

    def assert_serves(self, version: int) -> None:
        for replica in self.replicas:
            assert (replica.version, replica.paused) == (version, False)
            assert all(torch.equal(replica.weights[name], tensor) for name, tensor in weights(version).items())


@pytest.mark.parametrize(
    ("number", "cause", "stage_s", "named"),
    [
        (signal.SIGKILL, TransportError, FAR_S, "trainer-1"),
        (signal.SIGSTOP, TransportTimeout, NEAR_S, "trainer-1"),
        (None, IntegrityError, FAR_S, r"node-1.* from trainer-0"),
    ],
    ids=["killed", "stopped", "flips a bit"],
)
async def test_a_relay_that_fails_is_named_within_the_deadline_and_the_next_sync_works(
    number: int | None, cause: type[CheckpointEngineError], stage_s: float, named: str, tmp_path: Path
) -> None:
    async with HostsFleet(tmp_path, retries=0, deadlines={"stage_s": stage_s, "commit_s": NEAR_S}) as fleet:
        await fleet.sync(0)
        await fleet.sync(1)
        await fleet.trainers[1].on_landing(number)
        start_s = time.monotonic()
        with pytest.raises(SyncAborted, match=named) as raised:
            await fleet.sync(2)
        assert time.monotonic() - start_s < FAR_S
        assert isinstance(raised.value.__cause__, cause)
        assert (raised.value.version, raised.value.phase) == (2, "verify" if number is None else "stage")
        fleet.assert_serves(1)
        if number == signal.SIGKILL:
            await fleet.trainers[1].end()
            fleet.manager._membership.trainers[1] = fleet.trainers[1] = fleet.start_trainer(1)
        elif number is not None:
            fleet.trainers[1].signal(signal.SIGCONT)
        await fleet.sync(3)
        fleet.assert_serves(3)
    assert not arenas_in(tmp_path)


async def test_over_a_network_each_host_receives_the_others_pieces_once(tmp_path: Path) -> None:
    try:
        with joined_hosts() as hosts:
            async with HostsFleet(tmp_path, hosts, retries=0) as fleet:
                for version in (1, 2):
                    before = hosts[1].received_nbytes
                    await fleet.sync(version)
                    fleet.assert_serves(version)
                    half = sum(tensor.nbytes for tensor in weights(version).values()) / 2
                    assert half < hosts[1].received_nbytes - before < 1.2 * half
    except NotPermitted as exc:
        pytest.skip(str(exc))
