"""The weights of a Megatron rank, their gradients over all ranks, and AdamW on them."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from verl.checkpoint_engine.compat.torch import scale_all
from verl.workers.config import OptimizerConfig
from verl.workers.engine.decay import decay_groups
from verl.workers.engine.megatron.architectures import Cut
from verl.workers.engine.megatron.layout import LocalTensor, divide
from verl.workers.engine.megatron.library import parallel_state
from verl.workers.engine.schedule import learning_rate


class Weights:
    """The trained weights: the model's parameters, or copies in another dtype from which those are rounded.

    Checkpoints, exports and the weight source read `tensors`, under Megatron's names; with adapters these include the
    frozen weights.
    """

    def __init__(self, model: torch.nn.Module, dtypes: Mapping[str, torch.dtype], *, trained: Collection[str]) -> None:
        """`dtypes`: those of the copies; a model without `trained` tensors needs none."""
        self._parameters = dict(model.named_parameters())
        self._trained = frozenset(trained)
        self.tensors: dict[str, torch.Tensor] = {}
        for name, parameter in self._parameters.items():
            parameter.requires_grad_(name in self._trained)
            dtype = dtypes[name] if trained else parameter.dtype
            self.tensors[name] = parameter.detach().to(dtype) if parameter.dtype != dtype else parameter
        for name in self._trained:
            parameter = self._parameters[name]
            if (weight := self.tensors[name]) is not parameter:
                weight.requires_grad_()
                when_accumulated: Any = parameter.register_post_accumulate_grad_hook
                when_accumulated(partial(_move_gradient, weight))

    def trained(self) -> dict[str, torch.Tensor]:
        """The part of `tensors` that an optimizer changes."""
        return {name: tensor for name, tensor in self.tensors.items() if name in self._trained}

    def publish(self) -> None:
        """Copy the present values of `tensors` into the model."""
        self._publish(self._parameters)

    def publish_trained(self) -> None:
        self._publish(self._trained)

    @torch.no_grad()
    def _publish(self, names: Iterable[str]) -> None:
        for name in names:
            if (weight := self.tensors[name]) is not self._parameters[name]:
                self._parameters[name].copy_(weight)


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
    """AdamW on `Weights`, whose gradients are those of the rank's own sequences until `step` adds up those of all.

    With `distributed` each data-parallel rank keeps the moments of a part of the tensors, steps those, and broadcasts
    them. Otherwise each rank keeps the moments of all its tensors.
    """

    def __init__(
        self,
        weights: Weights,
        tensors: Sequence[LocalTensor],
        config: OptimizerConfig,
        *,
        grad_clip: float,
        sequence_parallel: bool,
        distributed: bool,
    ) -> None:
        """Megatron's groups must exist. `tensors`, those that are trained, are in the same order on all ranks of a
        data-parallel group."""
        self._weights, self._tensors, self._config, self._grad_clip = weights, tensors, config, grad_clip
        self._sequence_parallel = sequence_parallel
        self._owners = _owners(weights, tensors) if distributed else {}
        self._own = [tensor for tensor in tensors if self._is_own(tensor)]
        self._steps = 0
        own = decay_groups(((tensor.name, weights.tensors[tensor.name]) for tensor in self._own), config)
        self._adamw = (
            torch.optim.AdamW(
                own,
                lr=learning_rate(0, config),
                betas=(config.betas[0], config.betas[1]),
                fused=True,
            )
            if own
            else None
        )

    @torch.no_grad()
    def step(self, lr_step: int, before_step: Callable[[], None]) -> float:
        """Sum and clip gradients, step if the norm is finite, clear. A collective; `before_step` as in engines.

        Returns the norm over all ranks before clipping.
        """
        gradients = self._summed_gradients()
        norm = self._global_norm(gradients)
        if math.isfinite(norm):
            scale = min(1.0, self._grad_clip / (norm + 1e-6))
            if scale < 1.0 and gradients:
                scale_all(list(gradients.values()), scale)
            if self._adamw is not None:
                for group in self._adamw.param_groups:
                    group["lr"] = learning_rate(lr_step, self._config)
            before_step()
            if self._adamw is not None:
                self._adamw.step()
            self._steps += 1
            for name, owner in self._owners.items():
                dist.broadcast(self._weights.tensors[name].detach(), group=owner.group, group_src=owner.rank)
            self._weights.publish_trained()
        for weight in self._weights.tensors.values():
            weight.grad = None
        return norm

    @property
    def steps(self) -> int:
        """The number of steps taken."""
        return self._steps

    @steps.setter
    def steps(self, count: int) -> None:
        self._steps = count
        for step in self._state("step").values():
            step.fill_(count)

    def moments(self) -> dict[str, dict[str, torch.Tensor]]:
        """Kind -> Megatron's name -> moment of the tensors that this rank steps; zeros before the first step."""
        return {kind: own for kind in ("exp_avg", "exp_avg_sq") if (own := self._state(kind))}

    def _state(self, kind: str) -> dict[str, torch.Tensor]:
        found: dict[str, torch.Tensor] = {}
        for tensor in self._own:
            assert self._adamw is not None  # there is something that this rank steps
            weight = self._weights.tensors[tensor.name]
            state: dict[str, Any] = self._adamw.state[weight]
            if not state:
                state["step"] = torch.zeros((), dtype=torch.float32, device=weight.device)
                state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(weight), torch.zeros_like(weight)
            found[tensor.name] = state[kind].detach()
        return found

    def _is_own(self, tensor: LocalTensor) -> bool:
        owner = self._owners.get(tensor.name)
        return owner is None or owner.rank == dist.get_rank(owner.group)

    def _summed_gradients(self) -> dict[str, torch.Tensor]:
        """Of what this rank steps. A collective: every rank takes the tensors of a group in the same order, whether it
        has a gradient or not."""
        gradients = {}
        for tensor in self._tensors:
            weight = self._weights.tensors[tensor.name]
            if weight.grad is None:  # an expert that no token came to
                weight.grad = torch.zeros_like(weight)
            if tensor.row.gradient_is_partial or (self._sequence_parallel and _is_replicated(tensor)):
                dist.all_reduce(weight.grad, group=parallel_state.get_tensor_model_parallel_group())
            if owner := self._owners.get(tensor.name):
                dist.reduce(weight.grad, group=owner.group, group_dst=owner.rank)
            else:
                dist.all_reduce(weight.grad, group=_data_parallel_group(tensor))
            if self._is_own(tensor):
                gradients[tensor.name] = weight.grad
                if _has_a_copy(tensor):  # last, as a sum of two is the same at both ends, whatever is rounded before
                    dist.all_reduce(weight.grad, group=parallel_state.get_embedding_group())
        return gradients

    def _global_norm(self, gradients: Mapping[str, torch.Tensor]) -> float:
        """Of the whole model, each element counted once. A collective of all ranks, with the same result on each."""
        squares = []
        for tensor in self._own:
            owner = self._owners.get(tensor.name)
            times = tensor.replicas // (dist.get_world_size(owner.group) if owner else 1)
            squares.append(torch.linalg.vector_norm(gradients[tensor.name], dtype=torch.float32).double() ** 2 / times)
        total = torch.stack(squares).sum().cpu() if squares else torch.zeros((), dtype=torch.float64)
        dist.all_reduce(total)
        return float(total.sqrt())


@dataclass(frozen=True, slots=True, kw_only=True)
class Owner:
    """The rank in a data-parallel group that keeps the moments of a tensor."""

    group: dist.ProcessGroup
    rank: int


def _owners(weights: Weights, tensors: Sequence[LocalTensor]) -> dict[str, Owner]:
    """By Megatron's name, where there are several ranks. Experts are shared by other ranks than the rest."""
    owners: dict[str, Owner] = {}
    for is_expert in (False, True):
        kind = [tensor for tensor in tensors if tensor.row.is_expert == is_expert]
        if kind and dist.get_world_size(group := _data_parallel_group(kind[0])) > 1:
            # Both ends of the pipeline take a tied embedding first, so that its owners, of rank 0, have a group.
            kind.sort(key=lambda tensor: (not tensor.is_tied, -weights.tensors[tensor.name].numel()))
            ranks = divide([weights.tensors[tensor.name].numel() for tensor in kind], dist.get_world_size(group))
            owners |= {tensor.name: Owner(group=group, rank=rank) for tensor, rank in zip(kind, ranks, strict=True)}
    return owners


def _data_parallel_group(tensor: LocalTensor) -> dist.ProcessGroup:
    group: dist.ProcessGroup = (
        parallel_state.get_expert_data_parallel_group()
        if tensor.row.is_expert
        else parallel_state.get_data_parallel_group()
    )
    return group


def _is_replicated(tensor: LocalTensor) -> bool:
    return tensor.row.cut is Cut.WHOLE and not tensor.row.is_expert


def _has_a_copy(tensor: LocalTensor) -> bool:
    """On the other end of the pipeline, as tied embeddings have."""
    return tensor.is_tied and parallel_state.get_pipeline_model_parallel_world_size() > 1
