"""The weights of a Megatron rank, their gradients over all ranks, and AdamW on them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from verl.workers.config import OptimizerConfig
from verl.workers.engine.megatron.architectures import Cut
from verl.workers.engine.megatron.layout import LocalTensor
from verl.workers.engine.megatron.library import parallel_state
from verl.workers.engine.schedule import learning_rate


class Weights:
    """What is trained: the model's own parameters, or copies in another dtype that the model's are rounded from.

    Checkpoints, exports and the weight source read `tensors`, under Megatron's names.
    """

    def __init__(self, model: torch.nn.Module, dtype: torch.dtype, *, trainable: bool) -> None:
        """`dtype` is that of the copies; a model that is not trained needs none."""
        self._parameters = dict(model.named_parameters())
        model.requires_grad_(trainable)
        self.tensors: dict[str, torch.Tensor] = {
            name: parameter.detach().to(dtype) if trainable and parameter.dtype != dtype else parameter
            for name, parameter in self._parameters.items()
        }
        if trainable:
            for name, parameter in self._parameters.items():
                if (weight := self.tensors[name]) is not parameter:
                    weight.requires_grad_()
                    when_accumulated: Any = parameter.register_post_accumulate_grad_hook
                    when_accumulated(partial(_move_gradient, weight))

    @torch.no_grad()
    def publish(self) -> None:
        """Give the model the present values of `tensors`."""
        for name, parameter in self._parameters.items():
            if (weight := self.tensors[name]) is not parameter:
                parameter.copy_(weight)


@torch.no_grad()
def _move_gradient(weight: torch.Tensor, parameter: torch.Tensor) -> None:
    """Gradients of micro-batches are added up in the dtype of the weights."""
    assert parameter.grad is not None  # this hook runs when it has been accumulated
    if weight.grad is None:
        weight.grad = parameter.grad.to(weight.dtype)
    else:
        weight.grad += parameter.grad
    parameter.grad = None


class Optimizer:
    """AdamW on `Weights`, whose gradients are those of the rank's own sequences until `step` adds up those of all."""

    def __init__(
        self,
        weights: Weights,
        tensors: Sequence[LocalTensor],
        config: OptimizerConfig,
        *,
        grad_clip: float,
        sequence_parallel: bool,
    ) -> None:
        self._weights, self._tensors, self._config, self._grad_clip = weights, tensors, config, grad_clip
        self._sequence_parallel = sequence_parallel
        self.adamw = torch.optim.AdamW(
            weights.tensors.values(),
            lr=learning_rate(0, config),
            betas=(config.betas[0], config.betas[1]),
            weight_decay=config.weight_decay,
            fused=True,
        )

    @torch.no_grad()
    def step(self, lr_step: int) -> float:
        """Add up, clip, step unless the norm is not finite, clear. A collective.

        Returns the norm over all ranks before clipping.
        """
        gradients = self._summed_gradients()
        norm = _global_norm(gradients, self._tensors)
        if math.isfinite(norm):
            scale = min(1.0, self._grad_clip / (norm + 1e-6))
            if scale < 1.0:
                torch._foreach_mul_(list(gradients.values()), scale)
            for group in self.adamw.param_groups:
                group["lr"] = learning_rate(lr_step, self._config)
            self.adamw.step()
            self._weights.publish()
        self.adamw.zero_grad(set_to_none=True)
        return norm

    def state(self) -> dict[str, dict[str, torch.Tensor]]:
        """Kind of moment -> Megatron's name -> the tensor itself; made if no step has been taken yet."""
        moments: dict[str, dict[str, torch.Tensor]] = {}
        for name, weight in self._weights.tensors.items():
            state: dict[str, Any] = self.adamw.state[weight]
            if not state:
                state["step"] = torch.zeros((), dtype=torch.float32, device=weight.device)
                state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(weight), torch.zeros_like(weight)
            for kind, value in state.items():
                moments.setdefault(kind, {})[name] = value.detach()
        return moments

    def _summed_gradients(self) -> Mapping[str, torch.Tensor]:
        """A collective: every rank takes the tensors of a group in the same order, whether it has a gradient or not."""
        gradients = {}
        data, experts = parallel_state.get_data_parallel_group(), parallel_state.get_expert_data_parallel_group()
        for tensor in self._tensors:
            weight = self._weights.tensors[tensor.name]
            if weight.grad is None:  # an expert that no token came to
                weight.grad = torch.zeros_like(weight)
            gradients[tensor.name] = weight.grad
            if tensor.row.gradient_is_partial or (self._sequence_parallel and _is_replicated(tensor)):
                dist.all_reduce(weight.grad, group=parallel_state.get_tensor_model_parallel_group())
            if _has_a_copy(tensor):
                dist.all_reduce(weight.grad, group=parallel_state.get_embedding_group())
            dist.all_reduce(weight.grad, group=experts if tensor.row.is_expert else data)
        return gradients


def _is_replicated(tensor: LocalTensor) -> bool:
    return tensor.row.cut is Cut.WHOLE and not tensor.row.is_expert


def _has_a_copy(tensor: LocalTensor) -> bool:
    """On the other end of the pipeline, as tied embeddings have."""
    return tensor.is_tied and parallel_state.get_pipeline_model_parallel_world_size() > 1


def _global_norm(gradients: Mapping[str, torch.Tensor], tensors: Sequence[LocalTensor]) -> float:
    """Of the whole model, each element counted once. A collective of all ranks, with the same result on each."""
    squares = [
        torch.linalg.vector_norm(gradients[tensor.name], dtype=torch.float32).double() ** 2 / tensor.replicas
        for tensor in tensors
    ]
    total = torch.stack(squares).sum().cpu() if squares else torch.zeros((), dtype=torch.float64)
    dist.all_reduce(total)
    return float(total.sqrt())
