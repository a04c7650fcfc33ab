"""Places in a model whose values can be compared between transformers and an engine, by names that both have.

A name is the path of a module below the decoder layers, without what wraps them: `layers.3.mlp`. Engines fuse
projections (`qkv_proj`), so those of transformers have no counterpart; what attention gets and returns has.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn

EMBEDDINGS, NORM, LOGITS = "embeddings", "norm", "logits"
"""What the first layer gets; the output of the last norm; scores before sampling."""
IDS, POSITIONS, LOG_PROBS, SUM = "input_ids", "positions", "log_probs", "+"
"""`SUM` ends the name of the second of two hidden states, to which the first one is added."""
ATTENTION = ("query", "key", "value", "attention")
"""Below the path of an attention module: what its kernel gets, after RoPE, and what it returns."""
GATED = "gated"
"""Below the path of an MLP: the product of its gate, after the activation, and of what it gates."""
INPUT = "input"
"""Below the path of a module inside attention, or another mixer: what it gets. Nothing else shows what engines compute
together before it: projections before a norm of queries, a gate of the outputs, a recurrence."""
NOT_COMPARED = ("rotary_emb", "act_fn", "dropout", "experts", "attn", "paged")
"""Last parts of names of modules that return no hidden states, or are met by a place of their own."""


def decoder_layers(model: nn.Module) -> tuple[str, nn.ModuleList]:
    """The path and the list of the decoder layers of a language model.

    Raises LookupError for a model without them.
    """
    found = [
        (name, module)
        for name, module in model.named_modules()
        if isinstance(module, nn.ModuleList) and name.rpartition(".")[2] in ("layers", "h", "blocks") and len(module)
    ]
    seeing = ("vis", "image", "audio")
    found = [each for each in found if not any(word in each[0] for word in seeing)] or found
    if not found:
        raise LookupError(f"{type(model).__name__} has no list of decoder layers")
    return min(found, key=lambda each: each[0].count("."))


def modules_of(model: nn.Module) -> dict[str, nn.Module]:
    """Modules by their names as places: layers, what is in them, and the last norm."""
    path, layers = decoder_layers(model)
    root = path.rpartition(".")[0]
    above = model.get_submodule(root)
    found: dict[str, nn.Module] = {}
    for index, layer in enumerate(layers):
        found[f"layers.{index}"] = layer
        for name, module in _compared(layer):
            found[f"layers.{index}.{name}"] = module
    last = [name for name in ("norm", "final_layernorm", "ln_f", "final_norm") if hasattr(above, name)]
    if last:
        found[NORM] = getattr(above, last[0])
    return found


def _compared(module: nn.Module, prefix: str = "") -> Iterator[tuple[str, nn.Module]]:
    for name, child in module.named_children():
        if name in NOT_COMPARED:
            continue
        if getattr(child, "expert_gate", None) is None:  # vLLM's shared expert returns the product with its gate
            yield f"{prefix}{name}", child
        yield from _compared(child, f"{prefix}{name}.")


def entered(name: str) -> str | None:
    """The place that is what the module `name` gets, if nothing else shows it."""
    if name == "layers.0":
        return EMBEDDINGS
    path, _, last = name.rpartition(".")
    if last == "down_proj":
        return f"{path}.{GATED}"
    return f"{name}.{INPUT}" if name.count(".") > 2 else None


def is_block(place: str) -> bool:
    """Whether it is the output of a whole layer."""
    return place.startswith("layers.") and place.count(".") == 1


def tokens_first(states: torch.Tensor, tokens: int) -> torch.Tensor:
    """[1, tokens, heads, d] of a norm's queries or keys, which may come as [1, heads, tokens, d]: transposed then, and
    so not contiguous. Others come back as they are."""
    if states.dim() != 4:
        return states
    heads_first = states.shape[2] == tokens and (states.shape[1] != tokens or not states.is_contiguous())
    return states.transpose(1, 2) if heads_first else states


def states_in(arguments: tuple[Any, ...], options: Mapping[str, Any]) -> list[torch.Tensor]:
    """The hidden states among the arguments of a call: those of the first one's shape, at most two of them.

    An engine passes what a layer adds, and the sum to which it is to be added.
    """
    given = [each for each in (*arguments, *options.values()) if isinstance(each, torch.Tensor)]
    given = [each for each in given if each.is_floating_point() and each.dim() > 1]
    return [each for each in given[:2] if each.shape == given[0].shape]


def states_out(returned: Any) -> list[torch.Tensor]:
    """The hidden states among what a module returned."""
    return states_in(returned, {}) if isinstance(returned, tuple) else states_in((returned,), {})
