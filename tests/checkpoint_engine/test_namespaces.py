"""Members on hosts with nothing between them but a network."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from benchmarks.namespaces import Host, NotPermitted, joined_hosts
from tests.checkpoint_engine.backends import BACKENDS, EXAMPLE, using
from tests.checkpoint_engine.fakes import arenas_in
from tests.checkpoint_engine.member_processes import MemberProcess, Node, ProcessFleet, Rank, weights
from tests.checkpoint_engine.test_failures import POOLED, grown
from verl.checkpoint_engine.config import CheckpointEngineConfig
from verl.checkpoint_engine.errors import CheckpointEngineError, SyncAborted, TransportError, TransportTimeout
from verl.checkpoint_engine.memory.committed import committed_version

pytestmark = pytest.mark.cells(2)
TCP_ONLY = {"nixl": {"ucx_tls": "tcp"}}
"""UCX sees through namespaces: it would find that both ends share memory."""


class RankThere(Rank):
    def __init__(self, host: Host, *arguments: Any) -> None:
        host.enter()
        super().__init__(*arguments)


class NodeThere(Node):
    def __init__(self, host: Host, *arguments: Any) -> None:
        host.enter()
        super().__init__(*arguments)
        self._there = host

    async def host(self) -> str:
        return self._member.host

    async def cut_off_on_landing(self) -> None:
        """When a few transfers have landed, before others are begun."""
        self.spoil.arm_with(lambda _: self._there.cut_off())


class FleetOnHosts(ProcessFleet):
    """The trainer ranks on the first of the hosts, a node on each of the others."""

    def __init__(self, hosts: Sequence[Host], config: CheckpointEngineConfig, shm_dir: Path) -> None:
        self._trainers_host, *self._node_hosts = hosts
        super().__init__(config, shm_dir, nodes=len(self._node_hosts))

    def _start(self, name: str) -> MemberProcess:
        role, _, index = name.partition("-")
        if role == "trainer":
            return MemberProcess(name, RankThere, self._trainers_host, int(index), self.config)
        return MemberProcess(name, NodeThere, self._node_hosts[int(index)], int(index), self.config, self.shm_dir)


@contextlib.contextmanager
def hosts_or_skip(count: int, **links: float) -> Iterator[tuple[Host, ...]]:
    try:
        with joined_hosts(count, **links) as hosts:
            yield hosts
    except NotPermitted as exc:
        pytest.skip(str(exc))


def config_of(backend: str, **more: Any) -> CheckpointEngineConfig:
    options = {name: values for name, values in TCP_ONLY.items() if name == backend}
    values = {"backend": backend, "engine_kwargs": options, "retries": 0, "delta": "off"}
    return CheckpointEngineConfig.from_mapping(values | more)


def payload_nbytes(version: int) -> int:
    return sum(tensor.nbytes for tensor in weights(version).values())


@pytest.mark.parametrize("backend", [param for param in BACKENDS if param.values[0] not in ("naive", EXAMPLE)])
async def test_weights_cross_from_host_to_host(backend: str, tmp_path: Path) -> None:
    with hosts_or_skip(2) as hosts:
        async with FleetOnHosts(hosts, config_of(backend), tmp_path) as fleet:
            assert await fleet["node-0"].member.host() == hosts[1].namespace
            for version in (1, 2):
                before = hosts[1].received_nbytes
                await fleet.sync(version)
                fleet.assert_serves(version)
                assert hosts[1].received_nbytes - before > payload_nbytes(version)


@pytest.mark.parametrize(
    ("backend", "topology"),
    [using("gloo", "auto"), using("kimi_ckpt_engine", "auto"), using("nixl", "chain"), using("mooncake", "chain")],
)
async def test_the_trainers_host_sends_every_byte_once_however_many_nodes(
    backend: str, topology: str, tmp_path: Path
) -> None:
    with hosts_or_skip(4) as hosts:
        async with FleetOnHosts(hosts, config_of(backend, topology=topology), tmp_path) as fleet:
            await fleet.sync(1)
            before = [hosts[0].sent_nbytes, *(host.received_nbytes for host in hosts[1:])]
            await fleet.sync(2)
            fleet.assert_serves(2)
            after = [hosts[0].sent_nbytes, *(host.received_nbytes for host in hosts[1:])]
            for moved in (end - begin for begin, end in zip(before, after, strict=True)):
                assert payload_nbytes(2) < moved < 1.2 * payload_nbytes(2)


@pytest.mark.parametrize("backend", [using("nixl"), using("mooncake"), using("kimi_ckpt_engine")])
async def test_a_node_that_joins_late_from_a_host_of_its_own_is_let_in(backend: str, tmp_path: Path) -> None:
    with hosts_or_skip(3) as hosts:
        config = config_of(backend)
        async with FleetOnHosts(hosts[:2], config, tmp_path) as fleet:
            await fleet.sync(1)
            late = MemberProcess("node-1", NodeThere, hosts[2], 1, config, tmp_path)
            await fleet.manager.add_nodes([late])
            assert [committed_version(directory) for directory in arenas_in(tmp_path)] == [1, 1]
            await fleet.sync(2)
            fleet.assert_serves(2, arena=False)
            await late.close()
            await late.end()


DEADLINES = {f"{phase}_s": 20.0 for phase in ("prepare", "publish", "stage", "verify", "commit")}
SOON_S = 300.0
RETRANSMITTED_S = 120.0
"""Until TCP has tried again on connections that were given up, and they could be closed."""


@pytest.mark.parametrize(
    ("backend", "topology", "nodes"),
    [
        using("gloo", "auto", 2),
        using("nixl", "auto", 1),
        using("nixl", "chain", 2),
        using("mooncake", "auto", 1),
        using("kimi_ckpt_engine", "auto", 2),
    ],
)
async def test_a_host_that_is_cut_off_while_it_stages_fails_syncs_in_time_until_it_is_back(
    backend: str, topology: str, nodes: int, tmp_path: Path
) -> None:
    config = config_of(backend, topology=topology, update_weights_bucket_megabytes=1, deadlines=DEADLINES)
    with hosts_or_skip(1 + nodes) as hosts:
        async with FleetOnHosts(hosts, config, tmp_path) as fleet:
            await fleet.sync(0)
            await fleet.sync(1)
            before = await fleet.resources()
            await fleet.nodes[-1].member.cut_off_on_landing()
            error = await failure_in_time(fleet.sync(2))
            assert isinstance(error, SyncAborted)
            assert isinstance(error.__cause__, TransportTimeout)
            assert (error.version, error.phase) == (2, "stage")
            assert any(name in str(error) for name in ("trainer-0", f"node-{nodes - 1}"))
            fleet.assert_serves(1)
            error = await failure_in_time(fleet.sync(3))
            assert isinstance(error.__cause__ or error, TransportError)
            assert error.phase in ("prepare", "stage")
            fleet.assert_serves(1)
            assert fleet.dead() == []
            hosts[-1].join_again()
            await assert_syncs_go_on_and_nothing_leaks(fleet, before)


class Always(dict[str, Any]):
    """For `Through.before`: the same before every call."""

    def __init__(self, step: Any) -> None:
        super().__init__()
        self._step = step

    def get(self, *_: Any) -> Any:
        return self._step


@pytest.mark.cells(4)
@pytest.mark.parametrize(
    ("method", "phase"), [("begin", "publish"), ("stage", "stage"), ("verify", "verify"), ("commit", "commit")]
)
async def test_a_partition_in_any_phase_over_a_long_link_is_named_in_time_and_heals(
    method: str, phase: str, tmp_path: Path
) -> None:
    """Bytes and calls: whoever manages the sync is on the trainer's host."""
    within_s = DEADLINES | {"stage_s": 60.0}  # that is how long bytes take on a machine that is busy
    config = config_of("tcp", deadlines=within_s)
    with hosts_or_skip(2, gbit_per_s=0.1, delay_s=0.03, loss=0.02) as hosts:
        async with FleetOnHosts(hosts, config, tmp_path) as fleet:
            node, healed = fleet["node-0"], asyncio.Event()

            async def cut() -> None:
                hosts[1].cut_off()
                node.before = Always(healed.wait)
                await healed.wait()

            await fleet.sync(1)
            fleet.assert_serves(1)
            node.before[method] = cut
            error = await failure_in_time(fleet.sync(2))
            assert isinstance(error, SyncAborted)
            assert (error.version, error.phase, "node-0" in str(error)) == (2, phase, True)
            assert isinstance(error.__cause__, TransportTimeout)
            fleet.assert_serves(1)
            node.before = {}
            healed.set()
            hosts[1].join_again()
            await fleet.sync(3)
            fleet.assert_serves(3)


async def failure_in_time(sync: Awaitable[None]) -> CheckpointEngineError:
    start_s = time.monotonic()
    with pytest.raises(CheckpointEngineError) as raised:
        await sync
    assert time.monotonic() - start_s < SOON_S
    return raised.value


async def assert_syncs_go_on_and_nothing_leaks(fleet: FleetOnHosts, before: dict[str, dict[str, int]]) -> None:
    end_s, version = time.monotonic() + RETRANSMITTED_S, 4
    while True:
        await fleet.sync(version)
        fleet.assert_serves(version)
        leaked = grown(before, await fleet.resources(), POOLED.get(fleet.config.backend, 0))
        if not leaked:
            return
        assert time.monotonic() < end_s, leaked
        version += 1
        await asyncio.sleep(0.5)
