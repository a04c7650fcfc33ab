"""`kimi_ckpt_engine`: designated rollout nodes pull a version from its owners, and nodes forward it in a ring.

    owners ══ P2P reads ══> receivers, a part of the version each ══ P2P reads ══> the next node ══> ...

It uses Mooncake's wire and the topology `p2p_broadcast`: every byte leaves its owner once, for any number of nodes, and
each node once. There are as many receivers as network devices of owners. This module adds the choice of devices and the
limit on bounce memory.
"""

from __future__ import annotations

import socket
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import msgspec

from ..config import CheckpointEngineConfig, KimiCkptEngineOptions
from ..errors import ConfigError
from ..links.network import reached_at
from ..links.rdma import (
    INFINIBAND,
    get_my_rdma_device,
    get_rdma_devices,
    list_ib_devices,
    require_devices,
)
from ..links.wire import OwnerAddress, Wire
from ..memory.host_memory import free_host_nbytes
from ..plan.encoded import parsed
from ..plan.sync_plan import SyncPlan
from ..plan.topology import Topology, p2p_broadcast
from ..plan.types import Member
from ..support import envs
from .mooncake import MooncakeWire
from .one_sided import OneSidedEngine

NAME = "kimi_ckpt_engine"


class KimiCkptEngine(OneSidedEngine):
    capabilities = replace(OneSidedEngine.capabilities, topologies=("p2p_broadcast",))

    def __init__(self, *, member: Member, config: CheckpointEngineConfig) -> None:
        super().__init__(member=member, config=config)
        self._options = config.options_of(NAME, KimiCkptEngineOptions)

    @classmethod
    def check_host(cls, config: CheckpointEngineConfig) -> None:
        options = config.options_of(NAME, KimiCkptEngineOptions)
        reached_at(options.host, options.interface)
        _rdma_devices(options)

    @classmethod
    def build_topology(cls, trainers: Sequence[Member], nodes: Sequence[Member]) -> Topology:
        return p2p_broadcast(trainers, nodes, _devices_of(trainers))

    def open_wire(self, topology: Topology | None) -> Wire:
        options = self._options
        return MooncakeWire(
            host=reached_at(options.host, options.interface),
            protocol=options.p2p_protocol,
            devices=_rdma_devices(options, is_rank=self.member.role == "trainer"),
            admission=self.admission_of(topology),
        )

    def _expose(self, plan: SyncPlan) -> str:
        address = parsed(super()._expose(plan), OwnerAddress, "the address of a member")
        device = _rdma_devices(self._options, is_rank=True)
        return msgspec.json.encode(msgspec.structs.replace(address, device=device)).decode()

    @property
    def most_nbytes(self) -> int:
        return min(super().most_nbytes, self._options.bucket_size_megabytes * 2**20)

    @property
    def passed_at_once(self) -> int:
        return self._options.in_flight

    def bounce_room(self) -> int:
        """`mem_fraction` of the free host memory. Raises ConfigError if that is too little for `in_flight` pieces."""
        share = self._options.mem_fraction
        allowed = int(free_host_nbytes() * share)
        if allowed < self.passed_at_once * self.config.block_nbytes:
            raise ConfigError(
                f"checkpoint_engine.engine_kwargs.{NAME}.mem_fraction={share} of the free memory of "
                f"{socket.gethostname()} is {allowed} bytes, less than in_flight={self.passed_at_once} pieces of "
                f"{self.config.block_nbytes} bytes",
                phase="prepare",
                member=self.member.name,
            )
        return allowed


def _devices_of(trainers: Sequence[Member]) -> dict[str, str]:
    """The network device of each trainer rank, by the rank's name. With TCP the ranks of a host share one."""
    devices = {}
    for trainer in trainers:
        device = parsed(trainer.address, OwnerAddress, "the address of a member").device
        devices[trainer.name] = f"{trainer.host}/{device}"
    return devices


def _rdma_devices(options: KimiCkptEngineOptions, *, is_rank: bool = False, present_in: Path = INFINIBAND) -> str:
    """Devices for Mooncake, comma-separated; none with TCP. A node's one member uses all, a rank the one that is its.

    Raises ConfigError if they are not there, or cannot be divided among the ranks of this host.
    """
    if options.p2p_protocol != "rdma":
        return ""
    present = list_ib_devices(present_in)
    devices = [name.strip() for name in options.rdma_devices.split(",") if name.strip()] or get_rdma_devices(present_in)
    require_devices(devices, present, NAME, "p2p_protocol")
    if options.rdma_devices or not is_rank:
        return ",".join(devices)
    local_rank, local_world_size = envs.place_on_host()
    try:
        return get_my_rdma_device(local_rank, local_world_size, devices)
    except ValueError as exc:
        raise ConfigError(f"checkpoint_engine.engine_kwargs.{NAME}.rdma_devices is empty, and {exc}") from exc
