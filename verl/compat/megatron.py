"""megatron-core 0.16.1: replaces private functions for CUDA only. For `verl/workers/engine/megatron/cpu.py`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

CountsToHost = Callable[[Any, str, torch.Tensor | None], torch.Tensor | None]


def leave_cuda_generator_alone(random: Any) -> None:
    """Recomputation restores CUDA's generator beside the CPU's: tensor_parallel/random.py:447, 457."""
    random._get_cuda_rng_state = lambda graph_safe=False: None
    random._set_cuda_rng_state = lambda state, graph_safe=False: None


def leave_tied_embeddings_alone(language_model: Any) -> None:
    """Moves the last stage's copy of a tied embedding to CUDA and adds up the two, which is not needed: both are loaded
    from the checkpoint. models/common/language_module/language_module.py:242-245."""
    language_model._is_in_embd_group = lambda self: False


def count_tokens_by(dispatcher: Any, counts_to_host: CountsToHost) -> None:
    """Copy the counts of experts' tokens to the host with this function, and not on a CUDA stream.

    transformer/moe/token_dispatcher.py:444-445, 862-905.
    """
    dispatcher._maybe_dtoh_and_synchronize = counts_to_host
