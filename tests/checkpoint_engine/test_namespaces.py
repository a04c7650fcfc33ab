"""Members on two hosts with nothing between them but a network."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.checkpoint_engine.backends import BACKENDS
from tests.checkpoint_engine.member_processes import MemberProcess, Node, ProcessFleet, Rank, weights
from tests.checkpoint_engine.namespaces import Host, NotPermitted, joined_hosts
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


class FleetOnTwoHosts(ProcessFleet):
    def __init__(self, hosts: tuple[Host, Host], *arguments: Any) -> None:
        self._hosts = hosts
        super().__init__(*arguments)

    def _start(self, name: str) -> MemberProcess:
        role, _, index = name.partition("-")
        if role == "trainer":
            return MemberProcess(name, RankThere, self._hosts[0], int(index), self.config)
        return MemberProcess(name, NodeThere, self._hosts[1], int(index), self.config, self.shm_dir)


@pytest.fixture
def hosts() -> Iterator[tuple[Host, Host]]:
    try:
        with joined_hosts() as pair:
            yield pair
    except NotPermitted as exc:
        pytest.skip(str(exc))


@pytest.mark.parametrize("backend", [param for param in BACKENDS if param.values != ("naive",)])
async def test_weights_cross_from_host_to_host(backend: str, hosts: tuple[Host, Host], tmp_path: Path) -> None:
    options = {name: values for name, values in TCP_ONLY.items() if name == backend}
    config = CheckpointEngineConfig.from_mapping({"backend": backend, "engine_kwargs": options, "retries": 0})
    async with FleetOnTwoHosts(hosts, config, tmp_path) as fleet:
        assert await fleet["node-0"].member.host() == hosts[1].namespace
        for version in (1, 2):
            before = hosts[1].received_nbytes
            await fleet.sync(version)
            fleet.assert_serves(version)
            assert hosts[1].received_nbytes - before > sum(tensor.nbytes for tensor in weights(version).values())
