"""vLLM's rotary embeddings beside transformers', of models with random weights: no engine.

    python -m tests.models.rope_process

Prints one line of JSON: by the name of a case, the longest sequence that vLLM is made for, and the length of one, how
far apart they rotate a query.
"""

from __future__ import annotations

import copy
import json
import sys
from types import SimpleNamespace
from typing import Any

HEAD = 32


def main() -> None:
    from tests.models.test_engine_ropes import CASES, LENGTHS, config_of

    found = {
        f"{name} {longest} {length}": _distance(config_of(name), longest, length)
        for name in CASES
        for longest in LENGTHS
        for length in LENGTHS
        if length <= longest
    }
    sys.stdout.write("\n" + json.dumps(found) + "\n")


def _distance(config: Any, longest: int, length: int) -> float:
    """Infinite where vLLM has no such positions."""
    import torch
    from transformers import AutoModelForCausalLM
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.model_executor.layers import rotary_embedding

    engine = VllmConfig()
    engine.model_config = SimpleNamespace(max_model_len=longest)
    rotary_embedding._ROPE_DICT.clear()
    with set_current_vllm_config(engine):
        theirs = rotary_embedding.get_rope(
            HEAD,
            max_position=config.max_position_embeddings,
            rope_parameters=copy.deepcopy(config.rope_parameters),
            dtype=torch.float32,
        )
    model = AutoModelForCausalLM.from_config(config)
    ours = next(module for name, module in model.named_modules() if name.endswith("rotary_emb"))
    positions, query = torch.arange(length), torch.randn(length, HEAD)
    cos, sin = ours(query[None], positions[None])
    half = torch.cat((-query[:, HEAD // 2 :], query[:, : HEAD // 2]), dim=-1)
    expected = query * cos[0] + half * sin[0]
    compute = getattr(theirs, "forward_native", theirs.forward)
    try:
        found = compute(positions, query.clone(), query.clone())[0]
    except IndexError:
        return float("inf")
    return float((found - expected).abs().max())


if __name__ == "__main__":
    main()
