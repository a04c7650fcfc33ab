"""A second model of a vLLM worker's configuration, loaded from tensors in memory as vLLM loads from disk."""

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
    """Its model is loaded from plain weights, and quantizes those of a layer when they have come."""
    return vllm_config.quant_config is not None and vllm_config.quant_config.get_name() == "online"


def without_quantization(vllm_config: VllmConfig) -> VllmConfig:
    """A copy for the model that the weights are made for."""
    plain = copy.copy(vllm_config)
    plain.model_config = copy.copy(vllm_config.model_config)
    plain.model_config.quantization = None
    plain.quant_config = None
    return plain


def standing_alone(vllm_config: VllmConfig) -> VllmConfig:
    """A copy for a second model of a worker: layers enter themselves into the configuration, each name once."""
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
    """A model with memory of its own, on the worker's device. `weights` have the checkpoint's names and may be lent.

    `watch` is shown it before anything is loaded; what loading leaves unwritten then holds NaNs.

    Called on every rank of an engine at the same time: a layer may gather what the ranks hold.
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
    """New tensors hold NaNs, not what was in that memory before: what is not written stays recognisable."""
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
