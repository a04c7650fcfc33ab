"""Writing a Hugging Face model directory from a sharded model."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.distributed.tensor import DTensor
from transformers import PretrainedConfig

from verl.workers.config import HFModelConfig
from verl.workers.engine.fsdp.lora import BASE, Adapters, is_adapter
from verl.workers.engine.fsdp.mesh import replication_allowed
from verl.workers.engine.fsdp.tensors import HeldTensor, split_experts, tied_aliases
from verl.workers.engine.hf_directory import FILE_NBYTES, write_hf_directory


@torch.no_grad()
@replication_allowed()
def export_hf(
    directory: Path,
    model: Any,
    model_config: HFModelConfig,
    *,
    dtype: torch.dtype,
    adapters: Adapters | None = None,
    file_nbytes: int = FILE_NBYTES,
) -> None:
    """Write config, tokenizer and safetensors files (floating tensors as `dtype`) that transformers and vLLM load.

    `adapters` are merged into the weights.

    A collective: each tensor is gathered on its own, and rank 0 holds no more than one file of about `file_nbytes`.
    Everything is synced to disk when this returns.
    """
    tensors, hf_config = _tensors(model), cast("PretrainedConfig", model.config)

    def collect(name: str) -> dict[str, torch.Tensor]:
        full = _gather(tensors[name])
        if adapters is not None:
            full, name = adapters.merge(name, full), name.replace(BASE, ".")
        return _as_in_checkpoint(name, full, hf_config.model_type, dtype) if dist.get_rank() == 0 else {}

    write_hf_directory(
        directory,
        {name: _nbytes(tensor, dtype) for name, tensor in tensors.items()},
        collect,
        hf_config=hf_config,
        generation_config=getattr(model, "generation_config", None),
        model_config=model_config,
        dtype=dtype,
        file_nbytes=file_nbytes,
    )


def _tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    """As they are sharded, tied ones once, without adapters."""
    aliases = tied_aliases(model)
    state: dict[str, Any] = get_model_state_dict(model)
    return {name: state[name] for name in state if name not in aliases and not is_adapter(name)}


def _gather(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def _as_in_checkpoint(name: str, full: torch.Tensor, model_type: str, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Copies in host memory, under the names of the checkpoint."""
    whole = {name: HeldTensor.whole(full, is_parameter=True)}
    dtype = dtype if full.is_floating_point() else full.dtype
    return {
        name: tensor.parts[0].values().to(device="cpu", dtype=dtype, copy=True).contiguous()
        for name, tensor in split_experts(whole, model_type).items()
    }


def _nbytes(tensor: torch.Tensor, dtype: torch.dtype) -> int:
    return tensor.numel() * (dtype if tensor.is_floating_point() else tensor.dtype).itemsize
