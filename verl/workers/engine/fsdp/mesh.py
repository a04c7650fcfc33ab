"""Group the ranks of a trainer by copies of the model and shared sequences."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from verl.utils.config import ConfigError
from verl.workers.config import FSDPConfig
from verl.workers.hf.sharers import Sharers

DTYPES = {
    "fp32": torch.float32,
    "float32": torch.float32,
    "bf16": torch.bfloat16,
    "bfloat16": torch.bfloat16,
    "fp16": torch.float16,
    "float16": torch.float16,
}


def build_mesh(device_type: str, fsdp_size: int) -> DeviceMesh:
    """One dimension over all ranks, or replicas x shards when `fsdp_size` is smaller than the world. A collective."""
    world_size = dist.get_world_size()
    if fsdp_size in (-1, world_size):
        return init_device_mesh(device_type, (world_size,), mesh_dim_names=("shard",))
    if fsdp_size <= 0 or world_size % fsdp_size:
        raise ConfigError(
            f"fsdp_config.fsdp_size={fsdp_size} does not divide the number of trainer ranks, {world_size}"
        )
    return init_device_mesh(device_type, (world_size // fsdp_size, fsdp_size), mesh_dim_names=("replicate", "shard"))


def sharers_of(size: int) -> Sharers:
    """This rank and those with which it shares sequences: `size` ranks, one after the other. A collective.

    Raises ConfigError if they do not divide the ranks.
    """
    if size == 1:
        return Sharers()
    if dist.get_world_size() % size:
        raise ConfigError(
            f"fsdp_config.ulysses_sequence_parallel_size={size} does not divide the number of trainer ranks, "
            f"{dist.get_world_size()}"
        )
    group, _ = dist.new_subgroups(size)  # type: ignore[no-untyped-call]
    return Sharers(group)


def offloads(config: FSDPConfig, device: torch.device) -> bool:
    """Whether parameters are in host memory and are copied to the device layer by layer."""
    return config.param_offload and device.type != "cpu"


@contextmanager
def replication_allowed() -> Iterator[None]:
    """In this block, suppress FSDP1's warnings about replication, which a single rank always does, and about partly
    frozen layers, which only cost memory."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*has both parameters with requires_grad=True and False")
        warnings.filterwarnings("ignore", message=".*`NO_SHARD`.*")
        yield
