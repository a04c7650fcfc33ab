"""Check that a model can compute rows that ranks share, each with some of the tokens and some of the heads."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from transformers import PreTrainedModel

from verl.compat.transformers import attention, remembers_tokens, takes_other_attention
from verl.utils.config import ConfigError
from verl.workers.hf.packing import LEAK, PROBE, SHARED, row_inputs, scales_by_column
from verl.workers.hf.regimes import FROM_LONGEST, ropes
from verl.workers.hf.sharers import Sharers

KEY = "ulysses_sequence_parallel_size"
ATTENTIONS = ("full_attention", "sliding_attention", "chunked_attention")
"""Kinds of layers, by configs' names, in which only a softmax over tokens mixes tokens."""


def attend_by_heads(model: PreTrainedModel, size: int) -> None:
    """Make `model` compute rows that `size` ranks share. Raises ConfigError if it is known that it cannot."""
    if problem := why_not_shared(model, size):
        raise ConfigError(f"{KEY}={size}: {problem}")
    model.set_attn_implementation(SHARED)


def why_not_shared(model: PreTrainedModel, size: int) -> str | None:
    """Why `size` ranks cannot share the heads of `model`, which may be on the meta device; empty if they can."""
    name, config = f"the model {type(model).__name__}", model.config.get_text_config()
    if remembers_tokens(model):
        return f"{name} has states beside keys and values, which go from token to token and not by heads"
    if others := sorted(set(getattr(config, "layer_types", None) or ()) - set(ATTENTIONS)):
        return f"{name} has layers of another kind than attention over all heads: {', '.join(others)}"
    if attention(model) != "sdpa":
        return f"{name} computes attention by {attention(model)!r}; only torch's fused one ('sdpa') is shared by heads"
    if not takes_other_attention(model):
        return f"{name} does not let its attention be replaced by one that is shared by heads"
    if found := sorted({str(rope.get("rope_type")) for rope in ropes(config)} & FROM_LONGEST):
        return f"{name} stretches positions as the largest one in a call asks (rope_type={found[0]})"
    if scales_by_column(model):
        return f"{name} scales queries by their place in the row (attn_temperature_tuning)"
    heads = getattr(config, "num_attention_heads", None)
    if not isinstance(heads, int) or heads % size:
        return f"{size} ranks cannot share the {heads} attention heads of {name} evenly"
    return None


@torch.no_grad()
def computes_shared(model: nn.Module, sharers: Sharers, device: torch.device) -> bool:
    """Whether a row has the same outputs on this rank alone and shared by `sharers`.

    A collective of all ranks: it calls the model twice, because no attribute shows whether other layers than attention
    mix tokens.
    """
    transformer: Any = model
    missing = -sum(PROBE) % sharers.size
    lengths = [*PROBE, *[missing] * (missing > 0)]
    most = min(transformer.config.get_text_config().vocab_size, 1000)
    ids = torch.randint(1, most, (1, sum(lengths)), generator=torch.Generator().manual_seed(0)).to(device)
    positions = torch.cat([torch.arange(length) for length in lengths])[None].to(device)
    states: list[torch.Tensor] = []
    head = transformer.get_output_embeddings() or transformer.score
    handle = head.register_forward_pre_hook(lambda module, args: states.append(args[0].float()))
    try:
        model(**row_inputs(model, ids, positions, lengths), use_cache=False)
        own = (sharers.own(ids), sharers.own(positions))
        model(**row_inputs(model, *own, lengths, sharers), use_cache=False)
    finally:
        handle.remove()
    whole, part = states
    difference = ((sharers.own(whole) - part).abs().max() / whole.std()).reshape(1)
    dist.all_reduce(difference, op=dist.ReduceOp.MAX)
    return bool(difference < LEAK)
