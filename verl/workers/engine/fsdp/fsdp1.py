"""torch FSDP1: it concatenates the parameters of a layer, and every rank holds an equal range.

Only this file and `verl/checkpoint_engine/compat/fsdp.py` depend on FSDP1.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import CPUOffload, FullyShardedDataParallel, MixedPrecision, ShardingStrategy
from torch.distributed.fsdp.wrap import CustomPolicy
from transformers import PreTrainedModel

from verl.checkpoint_engine.compat import fsdp
from verl.checkpoint_engine.plan.shards import flat_range_boxes
from verl.utils.config import ConfigError
from verl.utils.language_model import PARTLY_COMPUTED, sees
from verl.workers.config import FSDPConfig
from verl.workers.engine.adapters import has_adapters
from verl.workers.engine.fsdp.engine import FSDPEngine
from verl.workers.engine.fsdp.mesh import DTYPES, build_mesh, offloads, replication_allowed
from verl.workers.engine.fsdp.sharding import layers_apart
from verl.workers.engine.tensors import HeldTensor, Part, named_parameters, persistent_buffers


class FSDP1Sharding:
    """Implements `Sharding` with original parameters, so that an optimizer sees a layer's parameters one by one.

    A rank's range starts and ends anywhere in a parameter, and may leave out some of them altogether. Padding, which
    makes the ranges equal and aligns parameters, belongs to no parameter and is never held.
    """

    @replication_allowed()
    def shard(self, model: PreTrainedModel, config: FSDPConfig, device: torch.device) -> nn.Module:
        """One flat parameter for each of `layers_apart`, one for the rest: tied embeddings must be in one."""
        if has_adapters(model):
            raise ConfigError("actor.strategy=fsdp trains whole models: LoRA (model.lora_rank) needs strategy=fsdp2")
        if isinstance(model, PreTrainedModel) and sees(model.config) and model.config.model_type in PARTLY_COMPUTED:
            raise ConfigError(
                f"actor.strategy=fsdp loses layers of the tower of {model.config.model_type} of which nothing is used: "
                "set strategy=fsdp2"
            )
        mesh = build_mesh(device.type, config.fsdp_size)
        replicated = config.fsdp_size == 1 or mesh.size() == 1
        layers = set(layers_apart(model))
        sharded = FullyShardedDataParallel(
            model,
            # Groups of one rank would compute without ever summing gradients over their replicas.
            device_mesh=build_mesh(device.type, -1) if replicated else mesh,
            sharding_strategy=_strategy(
                replicated=replicated, hybrid=mesh.ndim == 2, reshard_after_forward=config.reshard_after_forward
            ),
            auto_wrap_policy=CustomPolicy(lambda module: module in layers),
            use_orig_params=True,
            mixed_precision=MixedPrecision(param_dtype=DTYPES[config.dtype], reduce_dtype=torch.float32),
            cpu_offload=CPUOffload(offload_params=offloads(config, device)),
            forward_prefetch=config.forward_prefetch,
            device_id=device,
            param_init_fn=_materialiser(device),
        )
        sharded.check_is_root()  # makes the local shards, which otherwise the first forward pass would do
        return sharded

    def held(self, model: nn.Module) -> dict[str, HeldTensor]:
        found: dict[str, HeldTensor] = {}
        for prefix, _, flat in fsdp.flat_parameters(model):
            for name, shape, info in fsdp.members(flat):
                found[fsdp.clean_tensor_name(f"{prefix}.{name}" if prefix else name)] = HeldTensor(
                    shape=shape, dtype=flat.dtype, is_parameter=True, parts=_parts(flat, shape, info)
                )
        tensors = {name: found[name] for name, _ in named_parameters(model)}
        return tensors | {name: HeldTensor.whole(b, is_parameter=False) for name, b in persistent_buffers(model)}

    def reshard(self, model: nn.Module) -> None:
        for _, unit, _ in fsdp.flat_parameters(model):
            fsdp.reshard(unit)

    def clip_grad_norm(self, model: nn.Module, max_norm: float) -> float:
        assert isinstance(model, FullyShardedDataParallel)
        return float(model.clip_grad_norm_(max_norm))


class FSDP1Engine(FSDPEngine):
    """`strategy=fsdp`."""

    sharding = FSDP1Sharding()


def _parts(flat: Any, shape: tuple[int, ...], info: Any) -> tuple[Part, ...]:
    """The boxes of the range of a parameter's elements that this rank holds; their values lie in a row in `flat`."""
    if not info.in_shard:
        return ()
    parts, offset = [], info.offset_in_shard
    for box in flat_range_boxes(shape, info.intra_param_start_idx, info.intra_param_end_idx + 1):
        values = functools.partial(_view, flat, offset, box.numel, box.shape)
        parts.append(Part(box=box, values=values))
        offset += box.numel
    return tuple(parts)


def _view(flat: Any, offset: int, numel: int, shape: tuple[int, ...]) -> torch.Tensor:
    return fsdp.local_shard(flat).detach()[offset : offset + numel].view(shape)


def _strategy(*, replicated: bool, hybrid: bool, reshard_after_forward: bool) -> ShardingStrategy:
    if replicated:
        return ShardingStrategy.NO_SHARD
    if hybrid:
        return ShardingStrategy.HYBRID_SHARD if reshard_after_forward else fsdp.HYBRID_SHARD_GRAD_OP
    return ShardingStrategy.FULL_SHARD if reshard_after_forward else ShardingStrategy.SHARD_GRAD_OP


def _materialiser(device: torch.device) -> Callable[[nn.Module], None]:
    """Gives a module memory, layer by layer, before FSDP flattens it. A tied parameter is made once."""
    made: dict[torch.Tensor, nn.Parameter] = {}

    def materialise(module: nn.Module) -> None:
        for name, parameter in list(module.named_parameters(recurse=False, remove_duplicate=False)):
            if parameter.is_meta:
                if parameter not in made:
                    empty = torch.empty_like(parameter, device=device)
                    made[parameter] = nn.Parameter(empty, requires_grad=parameter.requires_grad)
                setattr(module, name, made[parameter])
        for name, buffer in list(module.named_buffers(recurse=False, remove_duplicate=False)):
            if buffer.is_meta:
                setattr(module, name, torch.empty_like(buffer, device=device))

    return materialise
