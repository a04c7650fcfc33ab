"""Make a small model of the same configuration: narrow, with windows, chunks and top-k below short sequences.

A probe of it takes milliseconds, and covers lengths that the real model reaches after thousands of tokens.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Iterator
from typing import Any

from transformers import PretrainedConfig

from verl.workers.hf.regimes import DYNAMIC

SEEN = 8
"""Windows and chunks, in tokens."""
CHOSEN = 4
"""The number of keys, or blocks of keys, that a score chooses."""
ORIGINAL = 16
"""The original context length: longer sequences scale positions."""
VOCABULARY = 128
WIDTH = 64
EXPERTS = 8

_WINDOW = re.compile(r"window(_size|_length)?$|chunk_size$|^floor_scale$|keep_window_size$")
_CHOICE = re.compile(r"index.*topk|indexer_budget|num_.*selected_blocks")
_BLOCK = re.compile(r"index.*(block_size|kpool)$|compress_ratio$|sparse_block_size$")
_EXPERTS = re.compile(r"^(moe_)?(num|n)_(local_|routed_)?experts$|^zero_expert_num$")
_PER_TOKEN = re.compile(r"^(moe_)?(num_experts_per_tok(en)?|top_?k)$|^(top_k_experts|moe_num_experts_per_tok)$")
_FEED_FORWARD = re.compile(r"(intermediate|ffn).*(size|dim)$")
_RANK = re.compile(r"^(q|kv|o)_lora_rank$")
_STATE = re.compile(r"^(mamba_d_state|ssm_state_size|state_size)$")
_GROUP = re.compile(r"^(n_group|topk_group|num_expert_groups?|n_groups|mamba_n_groups|mamba_ngroups)$")
_LIMITS = ((_FEED_FORWARD, WIDTH), (_RANK, 32), (_EXPERTS, EXPERTS), (_PER_TOKEN, 2), (_GROUP, 1), (_STATE, 16))
_STATES = (
    ("mamba_n_heads", "mamba_d_head", "mamba_expand"),
    ("n_mamba_heads", "mamba_headdim", "mamba_expand"),
    ("num_heads", "head_dim", "expand"),
)
"""Names of numbers of heads, of their width, and of how much wider than the model they are together."""


_NUMBERS = re.compile(r"_layer_(ids|indices)$")
"""Lists of the layers that are of a kind."""
_REPEATED = re.compile(r"block_types$")
"""Lists of kinds of layers, which begin again where they end."""

SHRINKINGS = ((1, 2), (2, 2), (1, 1), (2, 1), (None, 2), (None, 1), (1, 0), (None, 0))
"""Ways to shrink, the strongest first: the number of layers of each kind (None: all), and their width. Not every class
of models supports the first ones."""


def shrunk(config: PretrainedConfig, *, of_a_kind: int | None, narrow: int) -> PretrainedConfig:
    """A copy of `config`, shrunk by one of `SHRINKINGS`. May raise any error of a configuration class."""
    other = copy.deepcopy(config)
    text = other.get_text_config()
    _shrink_what_is_seen(text)
    for name in ("vocab_size", "vocab_size_per_layer_input"):
        _set(text, name, VOCABULARY)
    _set(text, "rescale_every", 1)
    for part in _beside_text(other):
        _set(part, "num_hidden_layers", 1)
    _keep_tokens_inside(other)
    _keep_tokens_inside(text)
    if of_a_kind is not None:
        _leave_out_layers(text, of_a_kind)
    if narrow:
        _make_narrow(text, apart=narrow == 2)
    return other


def _beside_text(config: PretrainedConfig) -> Iterator[PretrainedConfig]:
    """What sees pictures or hears, which no probe asks."""
    text = config.get_text_config()
    for name in config.sub_configs:
        part = getattr(config, name, None)
        if isinstance(part, PretrainedConfig) and part is not text:
            yield part


def _shrink_what_is_seen(config: PretrainedConfig) -> None:
    for name, value in list(vars(config).items()):
        if not isinstance(value, int) or isinstance(value, bool):
            continue
        for pattern, limit in ((_WINDOW, SEEN), (_CHOICE, CHOSEN), (_BLOCK, CHOSEN)):
            if pattern.search(name) and value > limit:
                setattr(config, name, limit)
    _shrink_choice_of_pools(config)
    ropes = _get(config, "rope_parameters") or {}
    kinds = [rope for rope in (ropes, *ropes.values()) if isinstance(rope, dict)]
    for rope in kinds:
        if "original_max_position_embeddings" in rope:
            rope["original_max_position_embeddings"] = ORIGINAL
        if DYNAMIC in str(rope.get("rope_type")):
            config.max_position_embeddings = ORIGINAL
    if isinstance(_get(config, "original_max_position_embeddings"), int):
        config.original_max_position_embeddings = ORIGINAL
    if not any(DYNAMIC in str(rope.get("rope_type")) for rope in kinds):
        for name in ("max_position_embeddings", "n_positions", "max_seq_len"):
            _set(config, name, 256)
    rates = _get(config, "compress_rates")
    if isinstance(rates, dict):
        config.compress_rates = {name: min(rate, CHOSEN) for name, rate in rates.items()}


def _shrink_choice_of_pools(config: PretrainedConfig) -> None:
    """What is chosen in pools has to be a multiple of them."""
    if _get(config, "index_kpool"):
        config.index_kpool = min(config.index_kpool, 2)


def _keep_tokens_inside(config: PretrainedConfig) -> None:
    for name, value in list(vars(config).items()):
        if name.endswith("_token_id") and isinstance(value, int) and value >= VOCABULARY:
            setattr(config, name, VOCABULARY - 1)


def _leave_out_layers(config: PretrainedConfig, of_a_kind: int) -> None:
    """All but the first ones of each kind, by the lists that have an entry for each layer."""
    count = _get(config, "num_hidden_layers")
    if not isinstance(count, int):
        _set(config, "num_layers", 2)
        return
    of_stack = _get(config, "num_layers_per_stack")
    if isinstance(of_stack, int):  # layers that run several times, and have a slot of the cache for each
        config.num_layers_per_stack = min(2, of_stack)
        config.num_hidden_layers = count // of_stack * config.num_layers_per_stack
        return
    dense = _get(config, "first_k_dense_replace")
    for name, value in list(vars(config).items()):
        if (
            name.endswith("_layer_period") and isinstance(value, int) and value > 2
        ):  # then the second one is of the kind
            setattr(config, name, 2)
            setattr(config, name.replace("_period", "_offset"), 1)
    _write_out_repetitions(config, count)
    lists = {name: v for name, v in vars(config).items() if _is_of_layers(v, count)}
    numbers = {name: v for name, v in vars(config).items() if _NUMBERS.search(name) and isinstance(v, list)}
    seen: dict[tuple[str, ...], list[int]] = {}
    for layer in range(count):
        kind = (
            *(str(values[layer]) for values in lists.values()),
            *(str(layer in listed) for listed in numbers.values()),
        )
        if isinstance(dense, int):
            kind = (*kind, str(layer < dense))
        seen.setdefault(kind, []).append(layer)
    kept = sorted(layer for layers in seen.values() for layer in layers[:of_a_kind])
    if len(kept) == 1 and count > 1:
        kept = list(range(2))
    for name, values in lists.items():
        setattr(config, name, [values[layer] for layer in kept])
    for name, listed in numbers.items():
        setattr(config, name, [kept.index(layer) for layer in listed if layer in kept])
    if isinstance(dense, int):
        config.first_k_dense_replace = sum(layer < dense for layer in kept)
    config.num_hidden_layers = len(kept)
    _set(config, "num_blocks", len(kept))
    _set(config, "num_kv_shared_layers", 0)


def _write_out_repetitions(config: PretrainedConfig, count: int) -> None:
    for name, value in list(vars(config).items()):
        if _REPEATED.search(name) and isinstance(value, (list, tuple)) and value:
            setattr(config, name, [value[layer % len(value)] for layer in range(count)])


def _is_of_layers(values: Any, count: int) -> bool:
    """Whether it says of each layer what it is, rather than which number it has."""
    if not isinstance(values, (list, tuple)) or len(values) != count:
        return False
    return count <= 2 or len(set(map(str, values))) < count


def _make_narrow(config: PretrainedConfig, *, apart: bool) -> None:
    """`apart`: the width of heads has nothing to do with that of the model, where a config has one for them."""
    _narrow_attention(config, apart=apart)
    _narrow_states(config)
    for name, value in list(vars(config).items()):
        limit = next((limit for pattern, limit in _LIMITS if pattern.search(name)), None)
        if limit is None or isinstance(value, bool):
            continue
        if isinstance(value, list) and all(isinstance(entry, int) for entry in value):
            setattr(config, name, [min(limit, entry) for entry in value])
        elif isinstance(value, int) and value > limit:
            setattr(config, name, limit)


def _narrow_attention(config: PretrainedConfig, *, apart: bool) -> None:
    """Few heads of the width that they have, as many for each head of keys as before."""
    heads, shared = _get(config, "num_attention_heads"), _get(config, "num_key_value_heads")
    hidden = _get(config, "hidden_size")
    if not isinstance(heads, int) or not isinstance(hidden, int) or hidden <= WIDTH:
        return
    width = _get(config, "head_dim")
    apart = apart and isinstance(width, int)
    width = width if isinstance(width, int) else hidden // heads
    few = min(4, heads)
    if isinstance(shared, int):
        few_shared = min(2, shared)
        few = few_shared * (min(heads // shared, 2) if heads % shared == 0 else 1)
        config.num_key_value_heads = few_shared
    config.num_attention_heads = few
    config.hidden_size = WIDTH if apart else few * width
    if isinstance(_get(config, "attention_hidden_size"), int):  # of two streams side by side
        config.attention_hidden_size = 2 * config.hidden_size
        config.attention_head_dim = config.attention_hidden_size // few


def _narrow_states(config: PretrainedConfig) -> None:
    """Heads of states are as many as fill what a layer widens its input to."""
    if _get(config, "num_attention_heads") is None:
        for name in ("hidden_size", "attention_hidden_size", "embedding_dim"):
            _set(config, name, 2 * WIDTH)
    for heads, width, widened in _STATES:
        if all(isinstance(_get(config, name), int) for name in (heads, width, widened)):
            inner = _get(config, widened) * config.hidden_size
            if isinstance(_get(config, "mamba_d_ssm"), int):
                config.mamba_d_ssm = inner
            few = max(1, inner // _get(config, width))
            setattr(config, heads, few)
            setattr(config, width, inner // few)
    _set(config, "linear_num_heads", 2)
    _set(config, "lru_width", 2 * WIDTH)
    for name in ("linear_num_key_heads", "linear_num_value_heads"):
        value = _get(config, name)
        least = min(_get(config, other) or 1 for other in ("linear_num_key_heads", "linear_num_value_heads"))
        if isinstance(value, int):
            setattr(config, name, 2 * value // least)


def _set(config: Any, name: str, most: int) -> None:
    value = _get(config, name)
    if isinstance(value, int) and value > most:
        setattr(config, name, most)


def _get(config: PretrainedConfig, name: str) -> Any:
    """None without it. Configs of which layers have values of their own do not give away that of all by its name."""
    return vars(config).get(config.attribute_map.get(name, name))
