"""The only module that imports megatron-core."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager

from verl.workers.engine.megatron.installed import require_installed


@contextmanager
def quiet() -> Iterator[None]:
    """In this block, suppress Megatron's warnings about its own deprecated defaults and about Apex and Transformer
    Engine, which are optional."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


require_installed()

with quiet():
    from megatron.core.jit import disable_jit_fuser

    disable_jit_fuser()  # importing torch's compiler takes seconds, and no function that would be compiled is used here

    from megatron.core import parallel_state
    from megatron.core.dist_checkpointing import ShardedTensor
    from megatron.core.dist_checkpointing import load as load_dist_checkpoint
    from megatron.core.dist_checkpointing.core import CheckpointingException
    from megatron.core.models.common.language_module import language_module
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.models.gpt.gpt_model import GPTModel
    from megatron.core.pipeline_parallel import schedules
    from megatron.core.tensor_parallel import (
        copy_to_tensor_model_parallel_region,
        gather_from_sequence_parallel_region,
        model_parallel_cuda_manual_seed,
        reduce_from_tensor_model_parallel_region,
        reduce_scatter_to_sequence_parallel_region,
    )
    from megatron.core.tensor_parallel import random as megatron_random
    from megatron.core.transformer.moe import moe_utils
    from megatron.core.transformer.moe.token_dispatcher import MoEAlltoAllTokenDispatcher
    from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
    from megatron.core.transformer.transformer_config import TransformerConfig

if not hasattr(moe_utils, "te_general_gemm"):
    # Without Transformer Engine, transformer/moe/moe_utils.py:1192 asks whether a name is None that nobody has defined.
    moe_utils.te_general_gemm = None

__all__ = [
    "CheckpointingException",
    "ShardedTensor",
    "load_dist_checkpoint",
    "GPTModel",
    "MoEAlltoAllTokenDispatcher",
    "TransformerBlockSubmodules",
    "TransformerConfig",
    "copy_to_tensor_model_parallel_region",
    "gather_from_sequence_parallel_region",
    "get_gpt_layer_local_spec",
    "language_module",
    "megatron_random",
    "model_parallel_cuda_manual_seed",
    "parallel_state",
    "quiet",
    "reduce_from_tensor_model_parallel_region",
    "reduce_scatter_to_sequence_parallel_region",
    "schedules",
]
