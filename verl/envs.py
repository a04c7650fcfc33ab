"""Every environment variable that the project reads, with its default. Nothing else reads os.environ."""

from __future__ import annotations

import os
from pathlib import Path


def cache_dir() -> Path:
    """`VERL_CACHE_DIR`: where built-in models and data are made. Default `~/.cache/verl-sync`."""
    return Path(os.environ.get("VERL_CACHE_DIR", "~/.cache/verl-sync")).expanduser()


def shm_dir() -> Path:
    """`VERL_SHM_DIR`: the shared-memory file system that holds node arenas. Default `/dev/shm`."""
    return Path(os.environ.get("VERL_SHM_DIR", "/dev/shm"))


def raylet_pid() -> int | None:
    """`RAY_RAYLET_PID`, which Ray sets in its workers: the process that manages Ray's workers on this machine."""
    pid = os.environ.get("RAY_RAYLET_PID")
    return int(pid) if pid else None


def vllm_logging_level(default: str) -> str:
    """`VLLM_LOGGING_LEVEL`, passed on to vLLM's processes."""
    return os.environ.get("VLLM_LOGGING_LEVEL", default)


def ps_p2p_store_rdma_devices() -> str:
    """`PS_P2P_STORE_RDMA_DEVICES`: RDMA devices of P2P stores, comma-separated. Default: none named."""
    return os.environ.get("PS_P2P_STORE_RDMA_DEVICES", "")


def nccl_ib_hca() -> str:
    """`NCCL_IB_HCA`, as NCCL documents it: which RDMA devices to use. Default: all."""
    return os.environ.get("NCCL_IB_HCA", "")
