"""What a rank of vLLM must compute with, derived from the trainer's weights without any help of vLLM's."""

from __future__ import annotations

import re
from collections.abc import Mapping

import torch
from transformers import PretrainedConfig

VOCAB_MULTIPLE = 64
"""vLLM pads the vocabulary to a multiple of this before it divides it over ranks."""


def expected_on_rank(
    weights: Mapping[str, torch.Tensor], config: PretrainedConfig, rank: int, ranks: int, data_ranks: int = 1
) -> dict[str, torch.Tensor]:
    """`weights` have Hugging Face names and the rollout dtype; the result has vLLM's names.

    With several `data_ranks`, over which experts are dealt out, `rank` counts over all of them, each of `ranks`.
    """
    place, rank = rank, rank % ranks
    found: dict[str, torch.Tensor] = {}
    for name, tensor in weights.items():
        if re.search(r"\.(q|k|v|gate|up)_proj\.|\.experts\.", name):
            continue
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            tensor = tensor.chunk(ranks, dim=1)[rank]
        elif name in ("model.embed_tokens.weight", "lm_head.weight"):
            tensor = _vocab_rows(tensor, rank, ranks)
        found[name] = tensor
    if config.tie_word_embeddings:
        found["lm_head.weight"] = found["model.embed_tokens.weight"]
    for layer in range(config.num_hidden_layers):
        prefix = f"model.layers.{layer}"
        for kind in ("weight", "bias"):
            if f"{prefix}.self_attn.q_proj.{kind}" in weights:
                q, k, v = (weights[f"{prefix}.self_attn.{part}_proj.{kind}"].chunk(ranks)[rank] for part in "qkv")
                found[f"{prefix}.self_attn.qkv_proj.{kind}"] = torch.cat([q, k, v])
            if f"{prefix}.mlp.gate_proj.{kind}" in weights:
                gate, up = (weights[f"{prefix}.mlp.{part}_proj.{kind}"].chunk(ranks)[rank] for part in ("gate", "up"))
                found[f"{prefix}.mlp.gate_up_proj.{kind}"] = torch.cat([gate, up])
        if f"{prefix}.mlp.gate.weight" in weights:
            own, cuts, cut = range(config.num_experts), ranks, rank
            if data_ranks > 1:  # whole experts, as many as there are for each rank
                each = config.num_experts // (ranks * data_ranks)
                own, cuts, cut = range(place * each, (place + 1) * each), 1, 0
            gates, ups, downs = (
                [
                    weights[f"{prefix}.mlp.experts.{expert}.{matrix}_proj.weight"].chunk(cuts, dim=dim)[cut]
                    for expert in own
                ]
                for matrix, dim in (("gate", 0), ("up", 0), ("down", 1))
            )
            stacks = f"{prefix}.mlp.experts.routed_experts"
            found[f"{stacks}.w13_weight"] = torch.stack([torch.cat(pair) for pair in zip(gates, ups, strict=True)])
            found[f"{stacks}.w2_weight"] = torch.stack(downs)
    return found


def _vocab_rows(tensor: torch.Tensor, rank: int, ranks: int) -> torch.Tensor:
    missing = -len(tensor) % VOCAB_MULTIPLE
    return torch.cat([tensor, tensor.new_zeros(missing, tensor.shape[1])]).chunk(ranks)[rank]


def same_bits(found: torch.Tensor, expected: torch.Tensor) -> bool:
    """Zeros of either sign count as one: a sum of products with zeros does not keep the sign of a zero."""
    if found.dtype != expected.dtype or found.shape != expected.shape:
        return False
    as_integers = {2: torch.int16, 4: torch.int32}[found.element_size()]
    return torch.equal((found + 0.0).view(as_integers), (expected + 0.0).view(as_integers))
