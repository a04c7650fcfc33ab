"""Adapt megatron-core 0.16.1 to CPUs. Applied to the process once, and on `device=cpu` only.

Private names of it are in `verl/compat/megatron.py`. Each adaptation names the lines of megatron-core that need it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from functools import cache, wraps
from typing import Any

import torch

from verl.compat import megatron
from verl.workers.engine.megatron import library


@cache
def adapt() -> None:
    """Apply all adaptations. Idempotent. It needs a torch without CUDA, so that no other code uses what it replaces."""
    # Buffers of collectives and positions are made on the current device: tensor_parallel/mappings.py:91, 141, 181,
    # tensor_parallel/layers.py:552, 597, pipeline_parallel/p2p_communication.py:190-202, 313, 321,
    # models/common/embeddings/rotary_pos_embedding.py:162, transformer/moe/router.py:90.
    torch.cuda.current_device = lambda: torch.device("cpu")  # type: ignore[assignment, return-value]
    # A CPU's sends are done when they say so: pipeline_parallel/p2p_communication.py:242, 398.
    torch.cuda.synchronize = lambda device=None: None
    # Only dropout and initialisation draw from it, neither of which is used: tensor_parallel/random.py:243.
    library.megatron_random.CudaRNGStatesTracker.fork = lambda self, name="": contextlib.nullcontext()
    megatron.leave_cuda_generator_alone(library.megatron_random)
    # The count of tokens is made on device="cuda": pipeline_parallel/schedules.py:596, 983, 2138.
    library.schedules.torch = _TorchWithoutCuda(torch)
    megatron.leave_tied_embeddings_alone(library.language_module.LanguageModule)
    # Counts of tokens are on the CPU already, and there is no stream to copy them on:
    # transformer/moe/token_dispatcher.py:444-445, 862-905.
    dispatcher = library.MoEAlltoAllTokenDispatcher
    dispatcher.cuda_dtoh_stream = contextlib.nullcontext()
    megatron.count_tokens_by(dispatcher, _counts_as_arrays)


def _counts_as_arrays(dispatcher: Any, _: str, tokens_per_expert: torch.Tensor | None = None) -> torch.Tensor | None:
    """Collectives take counts as arrays, not as tensors."""
    for name in ("input_splits", "output_splits", "output_splits_tp"):
        if isinstance(counts := getattr(dispatcher, name), torch.Tensor):
            setattr(dispatcher, name, counts.numpy())
    return tokens_per_expert


class _TorchWithoutCuda:
    """The module `torch`, whose `zeros` takes cuda for cpu."""

    def __init__(self, module: Any) -> None:
        self._module = module
        self.zeros = _on_cpu(module.zeros)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)


def _on_cpu(function: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(function)
    def call(*arguments: Any, **named: Any) -> Any:
        return function(*arguments, **({**named, "device": "cpu"} if named.get("device") == "cuda" else named))

    return call
