"""Find the host of each server, and the rollout node from whose memory the servers of that host load."""

from __future__ import annotations

import ipaddress
import os
import secrets
import socket
import urllib.parse
from collections.abc import Sequence
from pathlib import Path

from ..config import CheckpointEngineConfig
from ..errors import ConfigError
from ..support import envs
from ..support.network import host_addresses
from ..sync.members import NodePort
from ..sync.rollout_node import RolloutNode
from .node_key import key_in
from .remote_node import COMMAND, ReportsThere, remote_node
from .reports import Reports, ReportsHere

HERE = 0
"""The index of the node in this process."""


class Hosts:
    """The rollout node of this process, and those of `verl-sync node` on other hosts. Each is made on first use."""

    def __init__(self, nodes: Sequence[str], key_file: Path | None, config: CheckpointEngineConfig) -> None:
        """`nodes`: `host:port` of each process. Raises ConfigError for invalid `nodes`, a missing key file, and names
        of unknown hosts."""
        if nodes and key_file is None:
            raise ConfigError(f"nodes={list(nodes)} need node_key, the file with the key of `{COMMAND}`")
        self._config = config
        self._key = key_in(Path(key_file)) if key_file is not None else b""
        self._places = [_place_of(node) for node in nodes]
        self._addresses = [_addresses_of(host) for host, _ in self._places]
        self._job = f"publisher-{os.getpid()}-{secrets.token_hex(4)}"
        self._reports = ReportsHere(envs.shm_dir())
        self.nodes: dict[int, NodePort] = {}
        """The nodes in use, by index."""

    def index_of(self, url: str) -> int:
        """The index of the node for the server at `url`. Raises ConfigError if its host has none."""
        host = urllib.parse.urlsplit(url).hostname or ""
        addresses = _addresses_of(host)
        for index, known in enumerate(self._addresses, HERE + 1):
            if known & addresses:
                return index
        own = {*host_addresses()}
        if addresses & own or any(ipaddress.ip_address(address).is_loopback for address in addresses):
            return HERE
        raise ConfigError(
            f"{url} is not on this host ({socket.gethostname()}), and nodes has no rollout node on its host. An engine "
            f"needs one to load from. Run `{COMMAND} --key-file F` there, and add it to nodes"
        )

    def node(self, index: int) -> NodePort:
        """The node with this index, which is in use from now on: who closes it removes it from `nodes`."""
        if index not in self.nodes:
            self.nodes[index] = (
                RolloutNode(HERE, self._config, job=self._job, shm_dir=envs.shm_dir())
                if index == HERE
                else remote_node(index, self._places[index - 1], self._key, self._config, job=self._job)
            )
        return self.nodes[index]

    def reports(self, index: int) -> Reports:
        """The reports of the host of this node, in which ranks of its SGLang servers answer."""
        return self._reports if index == HERE else ReportsThere(lambda: self.nodes[index])

    def close(self) -> None:
        """Remove answers of ranks on this host that were not read. Idempotent."""
        self._reports.close()


def _place_of(node: str) -> tuple[str, int]:
    host, _, port = node.rpartition(":")
    if not host or not port.isdecimal() or "/" in node:
        raise ConfigError(f"nodes: {node!r} is not host:port, as `{COMMAND}` says it")
    return host.strip("[]"), int(port)


def _addresses_of(host: str) -> set[str]:
    try:
        return {str(info[4][0]) for info in socket.getaddrinfo(host, None)}
    except OSError as exc:
        raise ConfigError(f"no host is called {host!r}: {exc}") from exc
