"""Compares the sum of what ranks compute with their own experts on a CPU with what one computes with all of them.

    python -m tests.checkpoint_engine.experts_process

Prints the largest difference, and the largest result, for a router that weighs outputs and one that weighs inputs.
"""

from __future__ import annotations

import json
import sys
from types import SimpleNamespace

import torch

NUM_EXPERTS, RANKS, TOKENS, HIDDEN, ROWS = 4, 2, 16, 64, 64


def main() -> None:
    from vllm.model_executor.layers.fused_moe.experts.cpu_moe import CPUUnquantizedExperts

    from verl.checkpoint_engine.engines.vllm.cpu_experts import with_own_experts

    torch.manual_seed(1)
    w13 = torch.randn(NUM_EXPERTS, 2 * ROWS, HIDDEN) / 8
    w2 = torch.randn(NUM_EXPERTS, HIDDEN, ROWS) / 8
    answers = []
    for top, weighs_input in ((2, False), (1, True)):
        tokens = torch.randn(TOKENS, HIDDEN)
        weights, ids = torch.randn(TOKENS, NUM_EXPERTS).softmax(-1).topk(top)
        whole = _computed(CPUUnquantizedExperts, w13, w2, tokens, weights, ids, None, weighs_input)
        each = NUM_EXPERTS // RANKS
        parts = torch.zeros_like(whole)
        for rank in range(RANKS):
            own = slice(rank * each, (rank + 1) * each)
            places = torch.full((NUM_EXPERTS,), -1, dtype=torch.int32)
            places[own] = torch.arange(each, dtype=torch.int32)
            kind = with_own_experts(CPUUnquantizedExperts)
            parts += _computed(kind, w13[own], w2[own], tokens, weights, ids, places, weighs_input)
        answers.append([(parts - whole).abs().max().item(), whole.abs().max().item()])
    sys.stdout.write("\n" + json.dumps(answers))


def _computed(
    kind: type,
    w13: torch.Tensor,
    w2: torch.Tensor,
    tokens: torch.Tensor,
    weights: torch.Tensor,
    ids: torch.Tensor,
    places: torch.Tensor | None,
    weighs_input: bool,
) -> torch.Tensor:
    """As vLLM's kernel does it: a weight that counts for the input is in it already."""
    from vllm._custom_ops import cpu_prepack_moe_weight
    from vllm.model_executor.layers.fused_moe.activation import MoEActivation

    experts = object.__new__(kind)
    experts._use_zentorch, experts.quant_config = False, SimpleNamespace(w1_bias=None, w2_bias=None)
    output = torch.zeros_like(tokens)
    experts.apply(
        output=output,
        hidden_states=tokens * weights if weighs_input else tokens,
        w1=cpu_prepack_moe_weight(w13.clone(), experts.isa),
        w2=cpu_prepack_moe_weight(w2.clone(), experts.isa),
        topk_weights=weights.clone(),  # the kernel writes into them
        topk_ids=ids.to(torch.int32),
        activation=MoEActivation.SILU,
        global_num_experts=NUM_EXPERTS,
        expert_map=places,
        a1q_scale=None,
        a2_scale=None,
        workspace13=torch.empty(0),
        workspace2=torch.empty(0),
        expert_tokens_meta=None,
        apply_router_weight_on_input=weighs_input,
    )
    return output


if __name__ == "__main__":
    main()
