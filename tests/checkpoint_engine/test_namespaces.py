"""Members on hosts with nothing between them but a network."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from benchmarks.namespaces import Host, NotPermitted, joined_hosts
from tests.checkpoint_engine.backends import BACKENDS, using
from tests.checkpoint_engine.member_processes import MemberProcess, Node, ProcessFleet, Rank, weights
from verl.checkpoint_engine.config import CheckpointEngineConfig

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

    async def host(self) -> str:
        return self._member.host


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
def hosts_or_skip(count: int) -> Iterator[tuple[Host, ...]]:
    try:
        with joined_hosts(count) as hosts:
            yield hosts
    except NotPermitted as exc:
        pytest.skip(str(exc))


def config_of(backend: str, **more: str) -> CheckpointEngineConfig:
    options = {name: values for name, values in TCP_ONLY.items() if name == backend}
    return CheckpointEngineConfig.from_mapping({"backend": backend, "engine_kwargs": options, "retries": 0, **more})


def payload_nbytes(version: int) -> int:
    return sum(tensor.nbytes for tensor in weights(version).values())


@pytest.mark.parametrize("backend", [param for param in BACKENDS if param.values != ("naive",)])
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
