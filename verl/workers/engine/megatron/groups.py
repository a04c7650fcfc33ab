"""Megatron's process groups, which are global to the process, and our collectives on them."""

from __future__ import annotations

import json
from typing import Any

import torch
import torch.distributed as dist

from verl.protocol import DataProto
from verl.workers.engine.copies import gather_rows
from verl.workers.engine.megatron.layout import ParallelSizes
from verl.workers.engine.megatron.library import parallel_state

_joined: tuple[dist.ProcessGroup, ParallelSizes] | None = None


def join(sizes: ParallelSizes) -> None:
    """Make the groups for `sizes` over the default process group, unless they exist. A collective."""
    global _joined
    world = dist.group.WORLD
    assert world is not None  # the caller has initialised it
    if _joined == (world, sizes):
        return
    parallel_state.destroy_model_parallel()
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=sizes.tensor,
        pipeline_model_parallel_size=sizes.pipeline,
        expert_model_parallel_size=sizes.expert,
        expert_tensor_parallel_size=sizes.expert_tensor,
        create_gloo_process_groups=False,
    )
    _joined = (world, sizes)


def gather_from_model_parallel(data: DataProto) -> tuple[DataProto, slice]:
    """As `gather_rows`. A collective of the tensor- and pipeline-parallel ranks."""
    return gather_rows(data, parallel_state.get_model_parallel_group())


def sharing_a_loss() -> dist.ProcessGroup | None:
    """The group of ranks that compute the same loss, each for its part of the model; None if it is this rank alone."""
    group: dist.ProcessGroup = parallel_state.get_tensor_model_parallel_group()
    return group if dist.get_world_size(group) > 1 else None


def from_last_stage(tensor: torch.Tensor) -> torch.Tensor:
    """The last stage's values of a CPU tensor that every stage has, in place. A collective of the pipeline's ranks."""
    dist.broadcast(tensor, parallel_state.get_pipeline_model_parallel_last_rank(), group=_pipeline_group())
    return tensor


def sum_of_stages(tensor: torch.Tensor) -> torch.Tensor:
    """The sum of a CPU tensor that every stage has, in place. A collective of the pipeline's ranks."""
    dist.all_reduce(tensor, group=_pipeline_group())
    return tensor


def largest_of_stages(tensor: torch.Tensor) -> torch.Tensor:
    """The maximum of a CPU tensor that every stage has, as `sum_of_stages`."""
    dist.all_reduce(tensor, dist.ReduceOp.MAX, group=_pipeline_group())
    return tensor


def record_from_last_stage(record: dict[str, Any] | None) -> dict[str, Any]:
    """The last stage's record of plain values on every stage; None on the others."""
    text = torch.frombuffer(bytearray(json.dumps(record).encode()), dtype=torch.uint8)
    length = from_last_stage(torch.tensor(len(text)))
    found: dict[str, Any] = json.loads(
        bytes(from_last_stage(text if record is not None else torch.empty(int(length), dtype=torch.uint8)).tolist())
    )
    return found


def _pipeline_group() -> dist.ProcessGroup:
    group: dist.ProcessGroup = parallel_state.get_pipeline_model_parallel_group()
    return group
