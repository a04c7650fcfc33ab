"""Build a second model for a vLLM worker's configuration, and load it from memory as vLLM loads from disk."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.config.load import LoadConfig
from vllm.model_executor.model_loader.base_loader import BaseModelLoader

from ...compat.vllm import own_rotary_tables

Weights = Iterable[tuple[str, torch.Tensor]]

Watch = Callable[[torch.nn.Module], None]


def quantizes_online(vllm_config: VllmConfig) -> bool:
    """Whether vLLM loads plain weights and quantizes each layer when its weights have arrived."""
    return vllm_config.quant_config is not None and vllm_config.quant_config.get_name() == "online"


def without_quantization(vllm_config: VllmConfig) -> VllmConfig:
    """A copy of the configuration for the plain, not quantized model."""
    plain = copy.copy(vllm_config)
    plain.model_config = copy.copy(vllm_config.model_config)
    plain.model_config.quantization = None
    plain.quant_config = None
    return plain


def standing_alone(vllm_config: VllmConfig) -> VllmConfig:
    """A copy for a second model of a worker: layers register in the configuration, and each name only once."""
    alone = copy.copy(vllm_config)
    alone.compilation_config = copy.copy(vllm_config.compilation_config)
    alone.compilation_config.static_forward_context = {}
    alone.compilation_config.static_all_moe_layers = []
    return alone


class _FromMemory(BaseModelLoader):
    """Everything of vLLM's way to load from disk but the files."""

    def __init__(self, weights: Weights, watch: Watch | None) -> None:
        super().__init__(LoadConfig())
        self._weights = weights
        self._watch = watch

    def download_model(self, model_config: Any) -> None:
        """There is nothing to download."""

    def load_weights(self, model: Any, model_config: Any) -> None:
        if self._watch is not None:
            self._watch(model)
        model.load_weights(iter(self._weights))


def load_as_from_disk(vllm_config: VllmConfig, weights: Weights, watch: Watch | None = None) -> torch.nn.Module:
    """Build and load a model with its own memory on the worker's device. `weights`: checkpoint names and tensors.

    `watch` is called with the model before the load; values that the load does not write are NaN then.

    All ranks of an engine call it together: a layer may gather values of all ranks.
    """
    alone = standing_alone(vllm_config)
    filling = nullcontext() if watch is None else filled_memory()
    with set_current_vllm_config(alone), own_rotary_tables(), filling, torch.no_grad():
        model: torch.nn.Module = _FromMemory(weights, watch).load_model(
            vllm_config=alone, model_config=alone.model_config
        )
    return model


@contextmanager
def filled_memory() -> Iterator[None]:
    """In this block, new tensors are filled with NaN, so that values that are not written can be recognised."""
    deterministic, warn_only = (
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
    )
    settings: Any = torch.utils.deterministic
    fills = settings.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True, warn_only=True)
    settings.fill_uninitialized_memory = True
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)
            yield
    finally:
        torch.use_deterministic_algorithms(deterministic, warn_only=warn_only)
        settings.fill_uninitialized_memory = fills
