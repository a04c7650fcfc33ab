"""Check that a model can be computed with `fsdp_config`. The driver does so before any process starts."""

from __future__ import annotations

import torch

from verl.utils.model import ATTENTION
from verl.workers.config import FSDPConfig, HFModelConfig
from verl.workers.engine.fsdp.model import CAUSAL_LM, TOKEN_VALUES, make_model, require_way, way_through
from verl.workers.hf.attention import require_attention
from verl.workers.hf.splitting import attend_by_heads


def check_job(config: FSDPConfig, model_config: HFModelConfig, world: int, device: str, labels: int) -> None:
    """Check the model in the local directory `model_config.path`. Some models do not allow ranks to share sequences.

    Raises ConfigError.
    """
    require_attention(model_config.override_config.get(ATTENTION), device)
    size, head = config.ulysses_sequence_parallel_size, TOKEN_VALUES if labels else CAUSAL_LM
    if size > 1:
        with torch.device("meta"):
            model = make_model(head, model_config, torch.float32)
        attend_by_heads(model, size)
    require_way(way_through(model_config, config, head), model_config)
