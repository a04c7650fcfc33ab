"""Writing a Hugging Face model directory from a sharded model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.distributed.tensor import DTensor

from verl.workers.config import HFModelConfig
from verl.workers.engine.fsdp.mesh import replication_allowed
from verl.workers.engine.fsdp.tensors import tied_aliases
from verl.workers.engine.hf_directory import FILE_NBYTES, write_hf_directory


@torch.no_grad()
@replication_allowed()
def export_hf(
    directory: Path,
    model: Any,
    model_config: HFModelConfig,
    *,
    dtype: torch.dtype,
    file_nbytes: int = FILE_NBYTES,
) -> None:
    """Write config, tokenizer and safetensors files (floating tensors as `dtype`) that transformers and vLLM load.

    A collective: each tensor is gathered on its own, and rank 0 holds no more than one file of about `file_nbytes`.
    Everything is synced to disk when this returns.
    """
    tensors = _tensors(model)
    write_hf_directory(
        directory,
        {name: _nbytes(tensor, dtype) for name, tensor in tensors.items()},
        lambda name: _gather(name, tensors[name], dtype),
        hf_config=model.config,
        generation_config=getattr(model, "generation_config", None),
        model_config=model_config,
        dtype=dtype,
        file_nbytes=file_nbytes,
    )


def _tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    """As they are sharded, tied ones once."""
    aliases = tied_aliases(model)
    state: dict[str, Any] = get_model_state_dict(model)
    return {name: state[name] for name in state if name not in aliases}


def _gather(name: str, tensor: torch.Tensor, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    full = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    if dist.get_rank() != 0:
        return {}
    dtype = dtype if full.is_floating_point() else full.dtype
    return {name: full.to(device="cpu", dtype=dtype).contiguous().clone()}


def _nbytes(tensor: torch.Tensor, dtype: torch.dtype) -> int:
    return tensor.numel() * (dtype if tensor.is_floating_point() else tensor.dtype).itemsize
