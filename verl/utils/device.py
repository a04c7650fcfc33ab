"""The device of this process, and verl's names for it."""

from __future__ import annotations

from typing import Any

from verl.checkpoint_engine.support.device import (
    DEVICES,
    allocated,
    any_device,
    device_module,
    distributed_backend,
    local_device,
    missing,
    resolve_device,
    rng_state,
    seed_everything,
    set_rng_state,
)

__all__ = [
    "DEVICES",
    "allocated",
    "any_device",
    "distributed_backend",
    "get_device_id",
    "get_device_name",
    "get_nccl_backend",
    "get_torch_device",
    "local_device",
    "missing",
    "resolve_device",
    "rng_state",
    "seed_everything",
    "set_rng_state",
]


def get_device_name() -> str:
    """verl's name for the device type of this process."""
    return resolve_device()


def get_torch_device() -> Any:
    """torch's module for this device: torch.cuda, torch.npu or torch.cpu."""
    return device_module(resolve_device())


def get_device_id() -> Any:
    """The current device in that module."""
    return get_torch_device().current_device()


def get_nccl_backend() -> str:
    """The collective backend of the device: nccl, hccl, or gloo on cpu."""
    return distributed_backend(resolve_device()).rpartition(":")[2]


def __getattr__(name: str) -> bool:
    if name in ("is_cuda_available", "is_npu_available"):  # asked when used: looking for NPUs imports their package
        return missing(name.split("_")[1]) is None
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
