"""The trainer ranks' default process group, guarded against other peers."""

from __future__ import annotations

import os
import socket
from datetime import timedelta

import torch.distributed as dist

from verl.checkpoint_engine.compat.torch import TCPStore
from verl.checkpoint_engine.links.rendezvous import listening_store
from verl.checkpoint_engine.support.admission import Admission, Doorkeeper
from verl.single_controller.worker import RankInfo

LOOPBACK = "127.0.0.1"


def join(info: RankInfo, backend: str, timeout: timedelta) -> Doorkeeper:
    """Join the default process group, a collective of all ranks. Returns the guard of this rank's listening sockets.

    torch's own store listens on all interfaces without a password. On one host all connections stay on loopback.
    """
    inside = info.world_size == info.local_world_size
    host = LOOPBACK if inside else info.master_addr
    if inside:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    doors = Doorkeeper(Admission(addresses=() if inside else info.host_addresses))
    dist.init_process_group(
        backend, store=_store(info, host, doors, timeout), rank=info.rank, world_size=info.world_size, timeout=timeout
    )
    return doors


def _store(info: RankInfo, host: str, doors: Doorkeeper, timeout: timedelta) -> TCPStore:
    """Where the ranks meet. Others try to connect before rank 0 listens, and at the moment when it begins to."""
    if info.rank:
        return TCPStore(host, info.master_port, is_master=False, timeout=timeout, wait_for_workers=False)
    sock = socket.socket()
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # the port is kept for this process
    sock.bind((host, info.master_port))
    return listening_store(sock, doors, timeout.total_seconds())
