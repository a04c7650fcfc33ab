"""A vLLM worker with expert parallelism on CPUs, which vLLM 0.32 lacks.

vLLM's CPU kernel uses global expert numbers as indices of the rank's own experts and reads past them: the worker ends
with SIGSEGV. Its CPU communicator lacks the collectives for parts of different sizes, with which data-parallel ranks
exchange tokens. On accelerators vLLM has both.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from vllm.distributed.device_communicators.base_device_communicator import DeviceCommunicatorBase
from vllm.distributed.device_communicators.cpu_communicator import CpuCommunicator
from vllm.model_executor.custom_op import op_registry_oot
from vllm.model_executor.layers.fused_moe.experts.cpu_moe import CPUUnquantizedExperts
from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod
from vllm.v1.worker.cpu_worker import CPUWorker


class ExpertsWorker(CPUWorker):  # type: ignore[misc]
    """The `worker_cls` of the engine."""

    def init_device(self) -> None:
        if UnquantizedFusedMoEMethod.__name__ not in op_registry_oot:
            UnquantizedFusedMoEMethod.register_oot(DealtMethod)
        communicator: Any = CpuCommunicator
        if communicator.all_gatherv is DeviceCommunicatorBase.all_gatherv:
            communicator.all_gatherv, communicator.reduce_scatterv = all_gatherv, reduce_scatterv
        super().init_device()


class DealtMethod(UnquantizedFusedMoEMethod):
    """Replaces vLLM's class in each layer of experts."""

    def __init__(self, moe: Any) -> None:
        super().__init__(moe)
        kind = self.experts_cls
        if moe.moe_parallel_config.use_ep and isinstance(kind, type) and issubclass(kind, CPUUnquantizedExperts):
            self.experts_cls = with_own_experts(kind)


def with_own_experts(kind: type[CPUUnquantizedExperts]) -> type[CPUUnquantizedExperts]:
    """A subclass of vLLM's experts for CPUs that computes with the experts of its rank."""
    return type(kind.__name__, (_OwnExperts, kind), {})


class _OwnExperts:
    """Mixed into vLLM's experts for CPUs: a token gets nothing here from experts that other ranks hold."""

    def apply(
        self, *, topk_weights: torch.Tensor, topk_ids: torch.Tensor, expert_map: torch.Tensor | None, **named: Any
    ) -> None:
        if expert_map is not None:
            topk_weights, topk_ids = own_share(topk_weights, topk_ids, expert_map)
            if named["apply_router_weight_on_input"]:
                # The weight is in the input already, of one expert a token; the kernel does not look at it.
                named["hidden_states"] = named["hidden_states"] * (topk_weights != 0)
        apply: Any = super().apply  # type: ignore[misc]
        apply(topk_weights=topk_weights, topk_ids=topk_ids, expert_map=None, **named)


def own_share(
    topk_weights: torch.Tensor, topk_ids: torch.Tensor, expert_map: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Convert global expert numbers `topk_ids` to (weights, indices among the rank's own experts), of the same shape.

    `expert_map`: the index by number, -1 for experts of other ranks, whose weight becomes 0.
    """
    places = expert_map[topk_ids.long()]
    return topk_weights * (places >= 0), places.clamp(min=0).to(topk_ids.dtype)


def all_gatherv(
    self: Any, input_: torch.Tensor | list[torch.Tensor], dim: int = 0, sizes: list[int] | None = None
) -> torch.Tensor | list[torch.Tensor]:
    """A method for vLLM's communicator: concatenate the rows of all ranks; rank r has `sizes[r]` rows."""
    if isinstance(input_, list):
        return [_gathered(self, tensor, dim, sizes) for tensor in input_]
    return _gathered(self, input_, dim, sizes)


def _gathered(communicator: Any, tensor: torch.Tensor, dim: int, sizes: list[int] | None) -> torch.Tensor:
    """gloo gathers parts of equal size, so all are filled up to the largest."""
    rows = tensor.movedim(dim, 0)
    sizes = sizes or [len(rows)] * communicator.world_size
    padded = rows.new_zeros(max(sizes), *rows.shape[1:])
    padded[: len(rows)] = rows
    parts = [torch.empty_like(padded) for _ in sizes]
    dist.all_gather(parts, padded, group=communicator.device_group)
    return torch.cat([part[:size] for part, size in zip(parts, sizes, strict=True)]).movedim(0, dim)


def reduce_scatterv(self: Any, input_: torch.Tensor, dim: int = -1, sizes: list[int] | None = None) -> torch.Tensor:
    """A method for vLLM's communicator: sum over ranks; rank r gets `sizes[r]` rows of the sum."""
    rows = input_.movedim(dim, 0).clone(memory_format=torch.contiguous_format)
    sizes = sizes or [len(rows) // self.world_size] * self.world_size
    dist.all_reduce(rows, group=self.device_group)
    begin = sum(sizes[: self.rank_in_group])
    return rows[begin : begin + sizes[self.rank_in_group]].movedim(0, dim)
