"""Writing a Hugging Face model directory from a sharded model."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.distributed.tensor import DTensor
from transformers import AutoTokenizer, PretrainedConfig

from verl.utils.files import sync_to_disk
from verl.workers.config import HFModelConfig
from verl.workers.engine.fsdp.hf_checkpoint import INDEX_FILE, SINGLE_FILE
from verl.workers.engine.fsdp.lora import BASE, Adapters, is_adapter
from verl.workers.engine.fsdp.mesh import replication_allowed
from verl.workers.engine.fsdp.tensors import HeldTensor, split_experts, tied_aliases

FILE_NBYTES = 5 * 10**9


@torch.no_grad()
@replication_allowed()
def export_hf(
    directory: Path,
    model: nn.Module,
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
    aliases, hf_config = tied_aliases(model), cast("PretrainedConfig", model.config)
    state: dict[str, Any] = get_model_state_dict(model)
    tensors: dict[str, torch.Tensor] = {
        name: state[name] for name in state if name not in aliases and not is_adapter(name)
    }
    groups = list(_files(tensors, dtype, file_nbytes))
    is_writer = dist.get_rank() == 0
    if is_writer:
        directory.mkdir(parents=True, exist_ok=True)
    weight_map: dict[str, str] = {}
    for index, names in enumerate(groups, start=1):
        file = SINGLE_FILE if len(groups) == 1 else f"model-{index:05d}-of-{len(groups):05d}.safetensors"
        content: dict[str, torch.Tensor] = {}
        for name in names:
            full = _gather(tensors[name])
            if adapters is not None:
                full, name = adapters.merge(name, full), name.replace(BASE, ".")
            if is_writer:
                content |= _as_in_checkpoint(name, full, hf_config.model_type, dtype)
        if is_writer:
            weight_map |= dict.fromkeys(content, file)
            save_file(content, directory / file, metadata={"format": "pt"})
    if is_writer:
        if len(groups) > 1:
            total = sum(_nbytes(tensor, dtype) for tensor in tensors.values())
            index_text = json.dumps({"metadata": {"total_size": total}, "weight_map": weight_map}, indent=2)
            (directory / INDEX_FILE).write_text(index_text)
        _write_config(directory, model, model_config, dtype)
        sync_to_disk(directory)
    dist.barrier()


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


def _files(tensors: dict[str, torch.Tensor], dtype: torch.dtype, file_nbytes: int) -> Iterator[list[str]]:
    """Names in runs of at most `file_nbytes`, or one tensor if that is larger."""
    names: list[str] = []
    nbytes = 0
    for name, tensor in tensors.items():
        if names and nbytes + _nbytes(tensor, dtype) > file_nbytes:
            yield names
            names, nbytes = [], 0
        names.append(name)
        nbytes += _nbytes(tensor, dtype)
    yield names


def _nbytes(tensor: torch.Tensor, dtype: torch.dtype) -> int:
    return tensor.numel() * (dtype if tensor.is_floating_point() else tensor.dtype).itemsize


def _write_config(directory: Path, model: Any, model_config: HFModelConfig, dtype: torch.dtype) -> None:
    config = copy.deepcopy(model.config)
    config.dtype = dtype
    config.save_pretrained(directory)
    if getattr(model, "generation_config", None) is not None:
        model.generation_config.save_pretrained(directory)
    tokenizer_path = Path(model_config.tokenizer_path or model_config.path)
    if (tokenizer_path / "tokenizer_config.json").is_file():
        tokenizer = AutoTokenizer.from_pretrained(tokenizer_path, trust_remote_code=model_config.trust_remote_code)
        if model_config.custom_chat_template:
            tokenizer.chat_template = model_config.custom_chat_template
        tokenizer.save_pretrained(directory)
