"""torch's FSDP: the part of each parameter that a rank holds.

The only public interface are state dicts, which gather or copy. FSDP1 gets no new interfaces upstream.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise, product
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy
from torch.distributed.fsdp._common_utils import clean_tensor_name
from torch.distributed.fsdp._runtime_utils import _reshard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.distributed.tensor.placement_types import _StridedShard

Bounds = tuple[int, ...]

__all__ = [
    "HYBRID_SHARD_GRAD_OP",
    "clean_tensor_name",
    "flat_parameters",
    "local_boxes",
    "local_shard",
    "members",
    "reshard",
]

HYBRID_SHARD_GRAD_OP = ShardingStrategy._HYBRID_SHARD_ZERO2
"""`SHARD_GRAD_OP` within a host, replicas between hosts: the only strategy of FSDP1 without a public name."""


def local_boxes(tensor: DTensor) -> list[tuple[Bounds, Bounds, tuple[slice, ...]]]:
    """The boxes of `tensor` that this rank holds: (start, stop, slices of the local tensor) of each.

    There are several if the tensor joins matrices of each of which a rank holds a part, as with tensor parallelism of
    transformers' experts. DTensor reports the local shape only: https://github.com/pytorch/pytorch/issues/116980.
    Raises ValueError for partial sums, and for a local shape that contradicts the placements.
    """
    mesh, placements = tensor.device_mesh, tensor.placements
    coordinate = mesh.get_coordinate()
    if coordinate is None:  # the rank is none of its mesh
        return []
    if not all(isinstance(placement, Replicate | Shard | _StridedShard) for placement in placements):
        raise ValueError(f"with placements {placements} no rank has its values")
    if any(isinstance(placement, _StridedShard) for placement in placements):
        runs = _runs_held(tensor, coordinate)
    else:  # eight times as fast
        shape, offset = compute_local_shape_and_global_offset(tensor.shape, mesh, placements)
        runs = [[(low, low + size, slice(0, size))] for low, size in zip(offset, shape, strict=True)]
    has, told = tuple(tensor.to_local().shape), tuple(sum(high - low for low, high, _ in one) for one in runs)
    if has != told:
        raise ValueError(f"with placements {placements} a rank has {[*told]} of it, not {[*has]}")
    return [
        (tuple(low for low, _, _ in box), tuple(high for _, high, _ in box), tuple(at for _, _, at in box))
        for box in product(*runs)
    ]


def _runs_held(tensor: DTensor, coordinate: Sequence[int]) -> list[list[tuple[int, int, slice]]]:
    """Of each dimension, the runs of indices that this rank holds."""
    held = [torch.arange(size) for size in tensor.shape]
    for size, index, placement in zip(tensor.device_mesh.shape, coordinate, tensor.placements, strict=True):
        if not isinstance(placement, Replicate):
            on = placement.dim  # type: ignore[attr-defined]
            held[on] = _split_along_one(placement)(held[on], size, with_padding=False, contiguous=False)[0][index]
    return [_runs(indices) for indices in held]


def _split_along_one(placement: Any) -> Any:
    """The method that splits tensors, of a placement like that on dimension 0."""
    factor = {"split_factor": placement.split_factor} if isinstance(placement, _StridedShard) else {}
    return type(placement)(0, **factor)._split_tensor


def _runs(indices: torch.Tensor) -> list[tuple[int, int, slice]]:
    """Of indices: (first, behind the last, where they are) of each that follow one another."""
    ends = (indices.diff() != 1).nonzero().flatten() + 1
    bounds = [0, *ends.tolist(), len(indices)] if len(indices) else []
    return [(int(indices[low]), int(indices[high - 1]) + 1, slice(low, high)) for low, high in pairwise(bounds)]


def flat_parameters(model: nn.Module) -> Iterator[tuple[str, Any, Any]]:
    """(name of the wrapped module, wrapper, flat parameter) of each FSDP1 wrapper, the root first."""
    for name, module in model.named_modules():
        if isinstance(module, FullyShardedDataParallel) and (handle := module._handle) is not None:
            yield name, module, handle.flat_param


def members(flat: Any) -> Iterator[tuple[str, tuple[int, ...], Any]]:
    """(name, shape, FSDP1's record of this rank's part) of each parameter in a flat one."""
    for name, shape, info in zip(flat._fqns, flat._shapes, flat._shard_param_infos, strict=True):
        yield name, tuple(shape), info


def local_shard(flat: Any) -> torch.Tensor:
    """The rank's shard, which exists also while the layer is gathered."""
    shard: torch.Tensor = flat._local_shard
    return shard


def reshard(wrapper: Any) -> None:
    """Free the gathered parameters of one wrapper, as after its backward pass. FSDP2's `reshard` is public."""
    handle = wrapper._handle
    if handle.uses_sharded_strategy:
        _reshard(wrapper, handle, free_unsharded_flat_param=True)
