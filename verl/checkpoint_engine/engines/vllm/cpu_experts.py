"""A vLLM worker that has what vLLM 0.32 lacks on CPUs to deal experts out over ranks.

Its kernel for experts takes their numbers in the whole model for places among the rank's own ones, and reads past them:
the worker is ended by SIGSEGV. Its communicator lacks the collectives for parts of different sizes, by which
data-parallel ranks hand each other tokens. On accelerators vLLM has both.
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
    """vLLM makes its workers of it: `worker_cls`."""

    def init_device(self) -> None:
        if UnquantizedFusedMoEMethod.__name__ not in op_registry_oot:
            UnquantizedFusedMoEMethod.register_oot(DealtMethod)
        communicator: Any = CpuCommunicator
        if communicator.all_gatherv is DeviceCommunicatorBase.all_gatherv:
            communicator.all_gatherv, communicator.reduce_scatterv = all_gatherv, reduce_scatterv
        super().init_device()


class DealtMethod(UnquantizedFusedMoEMethod):
    """vLLM makes it in place of its own class, for each layer of experts."""

    def __init__(self, moe: Any) -> None:
        super().__init__(moe)
        kind = self.experts_cls
        if moe.moe_parallel_config.use_ep and isinstance(kind, type) and issubclass(kind, CPUUnquantizedExperts):
            self.experts_cls = with_own_experts(kind)


def with_own_experts(kind: type[CPUUnquantizedExperts]) -> type[CPUUnquantizedExperts]:
    """A class of vLLM's experts for CPUs that computes with those of its rank."""
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
    """Weights and places among the rank's own experts, of numbers in the whole model.

    `expert_map`: the place by number, -1 for experts of other ranks, whose weight becomes 0.
    """
    places = expert_map[topk_ids.long()]
    return topk_weights * (places >= 0), places.clamp(min=0).to(topk_ids.dtype)


def all_gatherv(
    self: Any, input_: torch.Tensor | list[torch.Tensor], dim: int = 0, sizes: list[int] | None = None
) -> torch.Tensor | list[torch.Tensor]:
    """A method for vLLM's communicator: each rank's rows, one after the other; rank r has `sizes[r]` of them."""
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
    """A method for vLLM's communicator: the sum over ranks, of which rank r gets `sizes[r]` rows."""
    rows = input_.movedim(dim, 0).clone(memory_format=torch.contiguous_format)
    sizes = sizes or [len(rows) // self.world_size] * self.world_size
    dist.all_reduce(rows, group=self.device_group)
    begin = sum(sizes[: self.rank_in_group])
    return rows[begin : begin + sizes[self.rank_in_group]].movedim(0, dim)
