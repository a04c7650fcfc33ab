"""The architectures of the matrix, and checkpoints of them: random, tiny, in the directories that users have."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import (
    CONFIG_MAPPING,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    PretrainedConfig,
    PreTrainedModel,
)

from tests.models.configurations import AGAIN, KINDS, WRAPPERS
from verl.utils.builtin.tokenizer import build_tokenizer

FILE = "model.safetensors"
NOT_COMPUTED = {"rwkv": "RwkvForCausalLM changes its parameters while it computes"}
"""Architectures that no trainer and no hf engine takes, and what their refusals say."""


@dataclass(frozen=True, kw_only=True)
class Architecture:
    name: str
    model_type: str
    kind: str
    """Key of `tests.models.configurations.KINDS`."""
    config: Mapping[str, Any]
    notes: str = ""
    rewrite: Callable[[PreTrainedModel, Path], None] | None = None
    """Makes of a directory that transformers has saved what somebody else would have saved."""

    def make_config(self) -> PretrainedConfig:
        return CONFIG_MAPPING[self.model_type](**self.config)


def write_checkpoint(
    architecture: Architecture, directory: Path, *, seed: int = 0, dtype: torch.dtype = torch.float32
) -> None:
    """A directory with config, weights and a tokenizer. The same seed gives the same bytes.

    No parameter and no persistent buffer has the value that it starts with or one that can be forgotten without notice:
    norms are not 1, biases not 0, the row of the padding token neither. What transformers keeps in float32 at any dtype
    is float32 here.
    """
    model = build_random(architecture, seed)
    cast(model, dtype)
    model.save_pretrained(directory)
    if architecture.rewrite is not None:
        architecture.rewrite(model, directory)
    build_tokenizer(256).save_pretrained(directory)


def build_random(architecture: Architecture, seed: int) -> PreTrainedModel:
    """In float32."""
    auto: Any = AutoModelForImageTextToText if architecture.model_type in WRAPPERS else AutoModelForCausalLM
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model: PreTrainedModel = auto.from_config(
            architecture.make_config(), dtype=torch.float32, attn_implementation="eager"
        )
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, tensor in (*model.named_parameters(), *persistent_buffers(model)):
            if tensor.is_floating_point():
                tensor.copy_(_random_values(name, tensor, generator))
            elif name.endswith("tid2eid"):  # a table of the experts of each token
                tensor.copy_(torch.arange(tensor.numel()).reshape(tensor.shape) % 3 + 1)
    return model


def _random_values(name: str, initial: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Matrices keep the size of what they multiply; vectors, and the state's decay, stay around their first values."""
    noise = torch.randn(initial.shape, generator=generator)
    if name.endswith("balancing_biases"):  # Zaya's init sets the last one after loading, whatever the file says
        noise[-1] = 0
    if initial.dim() < 2 or name.endswith("A_log"):
        return initial + 0.1 * noise
    return noise / initial.shape[-1] ** 0.5


def persistent_buffers(model: nn.Module) -> list[tuple[str, torch.Tensor]]:
    """With their full names."""
    found = []
    for prefix, module in model.named_modules():
        for name, buffer in module.named_buffers(recurse=False):
            if name not in module._non_persistent_buffers_set:
                found.append((f"{prefix}.{name}" if prefix else name, buffer))
    return found


def cast(model: PreTrainedModel, dtype: torch.dtype) -> None:
    """Every parameter and persistent floating-point buffer, but those that transformers loads as float32 at `dtype`."""
    kept = set(model._keep_in_fp32_modules_strict or ())
    if dtype == torch.float16:
        kept |= set(model._keep_in_fp32_modules or ())
    for name, tensor in (*model.named_parameters(), *persistent_buffers(model)):
        if tensor.is_floating_point() and not any(part in name for part in kept):
            tensor.data = tensor.data.to(dtype)
    model.config.dtype = dtype


# ---- directories that transformers would not write


def _with_mtp(model: PreTrainedModel, directory: Path) -> None:
    """Layers that predict later tokens: transformers leaves them out, engines may use them."""
    tensors = load_file(directory / FILE)
    layer = {name: tensor for name, tensor in tensors.items() if ".layers.0." in name}
    extra = {
        name.replace("model.layers.0", "mtp.layers.0"): tensor.flip(0).contiguous() for name, tensor in layer.items()
    }
    save_file(tensors | extra, directory / FILE, metadata={"format": "pt"})


def _base_model(model: PreTrainedModel, directory: Path) -> None:
    """The model below the head, saved by itself: no prefix, no head, and a config that names its class."""
    model.base_model.save_pretrained(directory)


def _stacked(model: PreTrainedModel, directory: Path) -> None:
    """Under the names that the tensors have in the model: experts in one tensor."""
    state = {name: tensor.contiguous() for name, tensor in model.state_dict().items()}
    save_file(state, directory / FILE, metadata={"format": "pt"})


def _published(model: PreTrainedModel, directory: Path) -> None:
    """As Gemma 3 is published: transformers 5 has one level less in the tower, and does not write it back."""
    tensors = {
        name.replace("vision_tower.", "vision_tower.vision_model."): tensor
        for name, tensor in load_file(directory / FILE).items()
    }
    save_file(tensors, directory / FILE, metadata={"format": "pt"})


def _in_files(model: PreTrainedModel, directory: Path) -> None:
    (directory / FILE).unlink()
    model.save_pretrained(directory, max_shard_size="100KB")
    index = json.loads((directory / f"{FILE}.index.json").read_text())
    assert len(set(index["weight_map"].values())) > 2


def _variants() -> list[Architecture]:
    rows = (
        ("qwen3_moe-stacked", "qwen3_moe", {}, "experts stacked in the file, as in the model", _stacked),
        ("qwen3-mtp", "qwen3", {}, "layers in the file that predict later tokens", _with_mtp),
        ("llama-base", "llama", {"tie_word_embeddings": True}, "saved without the head: no `model.`", _base_model),
        ("llama-files", "llama", {}, "several files and an index", _in_files),
        ("mixtral-files", "mixtral", {}, "the experts of a layer in several files", _in_files),
    )
    return [
        Architecture(
            name=name,
            model_type=model_type,
            kind=_kind(model_type),
            config=KINDS[_kind(model_type)][model_type] | more,
            notes=notes,
            rewrite=rewrite,
        )
        for name, model_type, more, notes, rewrite in rows
    ]


def _kind(model_type: str) -> str:
    return next(kind for kind, rows in KINDS.items() if model_type in rows)


_ALL = [
    *(
        Architecture(
            name=model_type,
            model_type=model_type,
            kind=kind,
            config=config,
            rewrite=_published if model_type == "gemma3" else None,
        )
        for kind, rows in KINDS.items()
        for model_type, config in rows.items()
    ),
    *(
        Architecture(name=name, model_type=model_type, kind=_kind(model_type), config=config, notes=notes)
        for name, (model_type, config, notes) in AGAIN.items()
    ),
    *_variants(),
]
ARCHITECTURES: Mapping[str, Architecture] = {architecture.name: architecture for architecture in _ALL}
assert len(ARCHITECTURES) == len(_ALL)
