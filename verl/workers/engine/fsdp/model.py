"""A Hugging Face causal LM, sharded by FSDP2 before any weight exists, then filled with each rank's own rows."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from verl.checkpoint_engine.errors import PlanError
from verl.utils.config import ConfigError, did_you_mean
from verl.workers.config import FSDPConfig, HFModelConfig
from verl.workers.engine.fsdp.hf_checkpoint import HFCheckpoint
from verl.workers.engine.fsdp.tensors import check_names, checkpoint_tensors, local_part, tied_aliases

DTYPES = {
    "fp32": torch.float32,
    "float32": torch.float32,
    "bf16": torch.bfloat16,
    "bfloat16": torch.bfloat16,
    "fp16": torch.float16,
    "float16": torch.float16,
}


def build_model(
    model_config: HFModelConfig, fsdp_config: FSDPConfig, device: torch.device, *, trainable: bool
) -> tuple[PreTrainedModel, DeviceMesh]:
    """The model on `device`, sharded over the default process group, with the weights of its directory. A collective.

    Raises ConfigError for a directory or configuration that cannot be used, PlanError when the tensors of the model and
    of its checkpoint differ.
    """
    auto: Any = AutoModelForCausalLM
    directory = Path(model_config.path)
    hf_config = load_hf_config(model_config)
    mesh = build_mesh(device.type, fsdp_config.fsdp_size)
    with HFCheckpoint(directory) as checkpoint:
        with torch.device("meta"):
            model: PreTrainedModel = auto.from_config(
                hf_config,
                dtype=DTYPES[fsdp_config.model_dtype],
                attn_implementation="sdpa",
                trust_remote_code=model_config.trust_remote_code,
            )
        model.requires_grad_(trainable)
        check_names(checkpoint_tensors(model), checkpoint.names, tied_aliases(model), type(model).__name__)
        if trainable and model_config.enable_gradient_checkpointing:
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        _shard(model, fsdp_config, mesh)
        # Offloaded parameters live in host memory; FSDP brings them to the device layer by layer.
        model.to_empty(device="cpu" if _offloads(fsdp_config, device) else device)
        _load(model, checkpoint)
    _compute_buffers(model, device)
    return model, mesh


def load_hf_config(model_config: HFModelConfig) -> PretrainedConfig:
    """The model's config with `override_config` applied. Raises ConfigError for a field that it does not have."""
    if model_config.external_lib:
        importlib.import_module(model_config.external_lib)
    if not (Path(model_config.path) / "config.json").is_file():
        raise ConfigError(
            f"model.path={model_config.path} is not a Hugging Face model directory: it has no config.json"
        )
    hf_config: PretrainedConfig = AutoConfig.from_pretrained(
        model_config.path, trust_remote_code=model_config.trust_remote_code
    )
    for key, value in model_config.override_config.items():
        if not hasattr(hf_config, key):
            raise ConfigError(f"model.override_config.{key}: unknown field.{did_you_mean(key, hf_config.to_dict())}")
        setattr(hf_config, key, value)
    return hf_config


def build_mesh(device_type: str, fsdp_size: int) -> DeviceMesh:
    """One dimension over all ranks, or replicas x shards when `fsdp_size` is smaller than the world. A collective."""
    world_size = dist.get_world_size()
    if fsdp_size in (-1, world_size):
        return init_device_mesh(device_type, (world_size,), mesh_dim_names=("shard",))
    if fsdp_size <= 0 or world_size % fsdp_size:
        raise ConfigError(
            f"fsdp_config.fsdp_size={fsdp_size} does not divide the number of trainer ranks, {world_size}"
        )
    return init_device_mesh(device_type, (world_size // fsdp_size, fsdp_size), mesh_dim_names=("replicate", "shard"))


def _offloads(fsdp_config: FSDPConfig, device: torch.device) -> bool:
    return fsdp_config.param_offload and device.type != "cpu"


def _shard(model: PreTrainedModel, fsdp_config: FSDPConfig, mesh: DeviceMesh) -> None:
    """One FSDP group per decoder layer, one for the rest: tied embeddings must be gathered together."""
    layers = list(_decoder_layers(model))
    offload = CPUOffloadPolicy() if _offloads(fsdp_config, torch.device(mesh.device_type)) else OffloadPolicy()
    options: dict[str, Any] = {
        "mesh": mesh,
        "reshard_after_forward": fsdp_config.reshard_after_forward,
        "mp_policy": MixedPrecisionPolicy(param_dtype=DTYPES[fsdp_config.dtype], reduce_dtype=torch.float32),
        "offload_policy": offload,
    }
    sharded: list[FSDPModule] = [fully_shard(layer, **options) for layer in layers]
    fully_shard(model, **options)
    if fsdp_config.forward_prefetch:
        for layer, following in pairwise(sharded):
            layer.set_modules_to_forward_prefetch([following])


def _decoder_layers(model: PreTrainedModel) -> Iterator[nn.Module]:
    names = set(model._no_split_modules or ())
    return (module for module in model.modules() if type(module).__name__ in names)


@torch.no_grad()
def _load(model: PreTrainedModel, checkpoint: HFCheckpoint) -> None:
    """Fill every parameter and persistent buffer with this rank's rows, cast to the model's dtype."""
    tensors = checkpoint_tensors(model)
    wrong = [
        f"{name}: {tuple(tensor.shape)} in the model, {checkpoint.shape(name)} in the checkpoint"
        for name, tensor in tensors.items()
        if tuple(tensor.shape) != checkpoint.shape(name)
    ]
    if wrong:
        raise PlanError(f"shapes differ; {'; '.join(wrong)}")
    for name, tensor in tensors.items():
        box, local = local_part(tensor)
        if box.numel:
            local.copy_(checkpoint.read(name, box))


@torch.no_grad()
def _compute_buffers(model: PreTrainedModel, device: torch.device) -> None:
    """Give the buffers that no checkpoint holds (rotary frequencies) their values, which `meta` construction lost.

    transformers recomputes them in `_init_weights`; buffers that it does not know would stay NaN and are an error.
    """
    recompute: Any = model._init_weights
    pending: dict[str, torch.Tensor] = {}
    for prefix, module in model.named_modules():
        names = [name for name in module._non_persistent_buffers_set if getattr(module, name) is not None]
        for name in names:
            setattr(module, name, torch.full_like(getattr(module, name), float("nan"), device=device))
        if names:
            recompute(module)
        pending |= {f"{prefix}.{name}": getattr(module, name) for name in names}
    if unknown := sorted(name for name, buffer in pending.items() if buffer.isnan().any()):
        raise PlanError(f"{type(model).__name__} has buffers that cannot be recomputed: {', '.join(unknown)}")
