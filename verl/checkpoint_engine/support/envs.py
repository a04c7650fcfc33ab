"""Every environment variable that the checkpoint engine reads, with its default. It reads os.environ nowhere else."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

Number = TypeVar("Number", int, float)


def shm_dir() -> Path:
    """`VERL_SHM_DIR`: the shared-memory file system that holds node arenas. Default `/dev/shm`."""
    return Path(os.environ.get("VERL_SHM_DIR", "/dev/shm"))


def engine_deaths() -> Path | None:
    """`VERL_ENGINE_DEATHS`, which our own servers set: the file to which their vLLM writes the worker that died."""
    name = os.environ.get("VERL_ENGINE_DEATHS")
    return Path(name) if name else None


def place_on_host() -> tuple[int, int]:
    """`LOCAL_RANK` and `LOCAL_WORLD_SIZE`, which launchers set: this rank's index on its host, and the ranks there.

    Default: 0 of 1.
    """
    return int(os.environ.get("LOCAL_RANK", "0")), int(os.environ.get("LOCAL_WORLD_SIZE", "1"))


def ps_p2p_store_rdma_devices() -> str:
    """`PS_P2P_STORE_RDMA_DEVICES`: RDMA devices of P2P stores, comma-separated. Default: empty."""
    return os.environ.get("PS_P2P_STORE_RDMA_DEVICES", "")


def nccl_ib_hca() -> str:
    """`NCCL_IB_HCA`, as NCCL documents it: the RDMA devices to use. Default: all."""
    return os.environ.get("NCCL_IB_HCA", "")


def socket_interfaces() -> dict[str, str]:
    """`GLOO_SOCKET_IFNAME` and `NCCL_SOCKET_IFNAME`, as far as they are set: the interfaces of these libraries."""
    names = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
    return {name: value for name in names if (value := os.environ.get(name))}


def rank() -> int | None:
    """`RANK`: the rank of this process, which torchrun sets."""
    return _number("RANK", int)


def world_size() -> int | None:
    """`WORLD_SIZE`: the number of ranks, which torchrun sets."""
    return _number("WORLD_SIZE", int)


def local_world_size() -> int | None:
    """`LOCAL_WORLD_SIZE`: the number of ranks on this host, which torchrun sets."""
    return _number("LOCAL_WORLD_SIZE", int)


def master_address() -> str:
    """`MASTER_ADDR` and `MASTER_PORT`, the address of the ranks' store, as `host:port`; empty if one is not set."""
    host, port = os.environ.get("MASTER_ADDR", ""), os.environ.get("MASTER_PORT", "")
    return f"{host}:{port}" if host and port else ""


def torchrun_hosts_store() -> bool:
    """`TORCHELASTIC_USE_AGENT_STORE`: whether torchrun itself listens at the master address."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def ps_max_bucket_size_gb() -> float | None:
    """`PS_MAX_BUCKET_SIZE_GB`: the most GiB of a ParameterServer's bucket. Default: 8 on devices, 0.25 on CPU, but at
    least the largest tensor."""
    return _number("PS_MAX_BUCKET_SIZE_GB", float)


def verl_plugins() -> str:
    """`VERL_USE_EXTERNAL_PLUGINS`: the plugins that PyPI's verl loads: auto (all of them), none, or names."""
    return os.environ.get("VERL_USE_EXTERNAL_PLUGINS", "auto").strip().lower()


def _number(name: str, kind: Callable[[str], Number]) -> Number | None:
    value = os.environ.get(name)
    if not value:
        return None
    try:
        return kind(value)
    except ValueError as exc:
        raise ValueError(f"the environment variable {name} must be a number, not {value!r}") from exc
