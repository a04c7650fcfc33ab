"""torch's FSDP: which part of which parameter a rank holds.

Public are state dicts alone, which gather or copy. FSDP1 gets no new interfaces upstream.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy
from torch.distributed.fsdp._common_utils import clean_tensor_name
from torch.distributed.fsdp._runtime_utils import _reshard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

__all__ = [
    "HYBRID_SHARD_GRAD_OP",
    "clean_tensor_name",
    "flat_parameters",
    "local_box",
    "local_shard",
    "members",
    "reshard",
]

HYBRID_SHARD_GRAD_OP = ShardingStrategy._HYBRID_SHARD_ZERO2
"""`SHARD_GRAD_OP` inside of a host, replicas between hosts: the one strategy of FSDP1 without a public name."""


def local_box(tensor: DTensor) -> tuple[Sequence[int], Sequence[int]]:
    """(shape, offset) of what this rank holds of `tensor`.

    DTensor tells the local shape alone; asked for in https://github.com/pytorch/pytorch/issues/116980.
    """
    return compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)


def flat_parameters(model: nn.Module) -> Iterator[tuple[str, Any, Any]]:
    """(name of the module that is wrapped, wrapper, flat parameter). The root comes first."""
    for name, module in model.named_modules():
        if isinstance(module, FullyShardedDataParallel) and (handle := module._handle) is not None:
            yield name, module, handle.flat_param


def members(flat: Any) -> Iterator[tuple[str, tuple[int, ...], Any]]:
    """(name, shape, what this rank holds: FSDP1's own record of it) of the parameters in a flat one."""
    for name, shape, info in zip(flat._fqns, flat._shapes, flat._shard_param_infos, strict=True):
        yield name, tuple(shape), info


def local_shard(flat: Any) -> torch.Tensor:
    """The rank's shard, which is there whether or not the layer is gathered at the moment."""
    shard: torch.Tensor = flat._local_shard
    return shard


def reshard(wrapper: Any) -> None:
    """Give up what is gathered of one wrapper, as the end of its backward pass does. FSDP2's `reshard` is public."""
    handle = wrapper._handle
    if handle.uses_sharded_strategy:
        _reshard(wrapper, handle, free_unsharded_flat_param=True)
