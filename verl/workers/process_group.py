"""The trainer ranks' default process group, which only they can join."""

from __future__ import annotations

import os
import socket
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from verl.checkpoint_engine.compat.torch import TCPStore
from verl.checkpoint_engine.support.admission import Admission, Doorkeeper, opening
from verl.single_controller.worker import RankInfo

LOOPBACK = "127.0.0.1"


def join(info: RankInfo, backend: str, timeout: timedelta) -> Doorkeeper:
    """A collective of all ranks; who guards where this one listens.

    torch's own meeting place listens on all interfaces and asks nobody for a password. On one host everything stays
    inside of it.
    """
    inside = info.world_size == info.local_world_size
    host = LOOPBACK if inside else info.master_addr
    if inside:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    doors = Doorkeeper(Admission(addresses=() if inside else info.host_addresses))
    options: dict[str, Any] = {"timeout": timeout, "wait_for_workers": False, "is_master": info.rank == 0}
    if info.rank == 0:
        with opening:
            listener = socket.create_server((host, info.master_port))
            doors.guard(listener)
        options["master_listen_fd"] = listener.detach()
    store = TCPStore(host, info.master_port, **options)
    dist.init_process_group(backend, store=store, rank=info.rank, world_size=info.world_size, timeout=timeout)
    return doors
