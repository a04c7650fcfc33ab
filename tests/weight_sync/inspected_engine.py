"""The vLLM side of these tests: after every activation each worker writes down the weights that it computes with.

Imported by vLLM's processes, never by the test process.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
from vllm._custom_ops import cpu_prepack_moe_weight
from vllm.distributed.parallel_state import get_world_group
from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts
from vllm.model_executor.layers.linear import LinearBase, ReplicatedLinear
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding

from tests.weight_sync.replicas import pid_file, served_weights_file
from verl.checkpoint_engine.parameter_server import VllmColocateWorkerExtension
from verl.workers.rollout.vllm.engine import VLLMEngine


class InspectedVLLMEngine(VLLMEngine):
    async def activate(self, arena_path: str, version: int) -> None:
        await super().activate(arena_path, version)
        await self._running().collective_rpc("write_served_weights", args=(version,))


class ServedWeights(VllmColocateWorkerExtension):
    """vLLM mixes it into every worker: `worker_extension_cls`."""

    vllm_config: Any
    model_runner: Any

    def write_served_weights(self, version: int) -> None:
        directory = Path(self.vllm_config.additional_config["served_weights"])
        rank = get_world_group().rank_in_group  # over data-parallel ranks, too
        torch.save(served_weights(self.model_runner.get_model()), served_weights_file(directory, version, rank))
        pid_file(directory, rank).write_text(str(os.getpid()))

    def forget_weight_transfer_engine(self) -> None:
        """As if vLLM had started without `--weight-transfer-config`."""
        self.weight_transfer_engine = None


@torch.inference_mode()
def served_weights(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """What every layer computes with, by vLLM's name of the parameter.

    A linear layer may have packed its weights into a form that nobody can read (on CPU the parameter has shape [0]), so
    it is asked for its product with the identity. Every element of that is a sum of one weight and zeros: exact.
    """
    found: dict[str, torch.Tensor] = {}
    covered: set[int] = set()
    for name, layer in model.named_modules():
        if isinstance(layer, LinearBase):
            num_inputs = layer.input_size if isinstance(layer, ReplicatedLinear) else layer.input_size_per_partition
            found[f"{name}.weight"] = _matrix(layer, num_inputs, layer.params_dtype)
            if layer.bias is not None:
                nothing = torch.zeros(1, layer.input_size_per_partition, dtype=layer.params_dtype)
                found[f"{name}.bias"] = layer.quant_method.apply(layer, nothing, layer.bias)[0]
        elif isinstance(layer, ParallelLMHead):
            found[f"{name}.weight"] = _matrix(layer, layer.embedding_dim, layer.weight.dtype)
        elif isinstance(layer, VocabParallelEmbedding):
            rows = torch.arange(layer.num_embeddings_per_partition)
            found[f"{name}.weight"] = layer.quant_method.embedding(layer, rows)
        elif isinstance(layer, RoutedExperts):
            isa = layer.quant_method.moe_kernel.fused_experts.isa
            rows = layer.moe_config.intermediate_size_per_partition
            halves = _unpacked(layer.w13_weight, isa).chunk(2, dim=1)
            found[f"{name}.w13_weight"] = torch.cat([half[:, :rows] for half in halves], dim=1)
            found[f"{name}.w2_weight"] = _unpacked(layer.w2_weight, isa)[:, :, :rows]
        else:
            continue
        covered |= {id(parameter) for parameter in layer.parameters(recurse=False)}
    for name, parameter in model.named_parameters():
        if id(parameter) not in covered:
            found[name] = parameter.detach()
    return {name: tensor.contiguous().clone() for name, tensor in found.items()}


def _unpacked(packed: torch.Tensor, isa: str) -> torch.Tensor:
    """vLLM's CPU kernel has experts packed, which is an order of their elements: packing numbers shows it."""
    element = {2: torch.int16, 4: torch.int32}[packed.element_size()]
    parts = 4 // packed.element_size()  # of a number, in one element each
    numbers = torch.arange(packed.numel(), dtype=torch.int32).view(element)
    each = (numbers[start::parts].contiguous().view(packed.dtype).reshape(packed.shape) for start in range(parts))
    places = torch.stack([cpu_prepack_moe_weight(part, isa).view(element).flatten() for part in each], dim=1)
    unpacked = torch.empty_like(packed).flatten()
    unpacked[places.view(torch.int32).flatten().long()] = packed.flatten()
    return unpacked.view(packed.shape)


def _matrix(layer: Any, num_inputs: int, dtype: torch.dtype) -> torch.Tensor:
    product: torch.Tensor = layer.quant_method.apply(layer, torch.eye(num_inputs, dtype=dtype), None)
    return product.T
