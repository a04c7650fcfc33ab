"""Tiny multimodal models with random weights, for tests and as the start of the built-in one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from verl.utils.builtin.tiny import save_model, vary_vectors
from verl.utils.builtin.tokenizer import CHAT_TEMPLATE, VOCAB_SIZE, build_tokenizer
from verl.utils.config import ConfigError, did_you_mean

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerFast

START, END, PICTURE, VIDEO = SEEN_TOKENS = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
ARCHITECTURES = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl")
PATCH, MERGE = 14, 2
MOST_TOKENS = 16
"""The most tokens of a picture: a larger picture is scaled down."""


def seeing_tokenizer(model_max_length: int = 512) -> PreTrainedTokenizerFast:
    """The byte tokenizer with additional tokens for pictures, and a template that accepts messages in parts."""
    tokenizer = build_tokenizer(model_max_length)
    tokenizer.add_special_tokens({"additional_special_tokens": list(SEEN_TOKENS)})
    parts = (
        "{%- if message['content'] is string %}{{ message['content'] }}{% else %}{% for part in message['content'] %}"
        f"{{%- if part['type'] == 'image' %}}{START}{PICTURE}{END}"
        f"{{%- elif part['type'] == 'video' %}}{START}{VIDEO}{END}{{% else %}}{{{{ part['text'] }}}}{{% endif %}}"
        "{%- endfor %}{% endif %}"
    )
    tokenizer.chat_template = CHAT_TEMPLATE.replace("{{ message['content'] }}", parts)
    return tokenizer


def make_tiny_seeing_model(
    directory: str | Path, architecture: str = "qwen2_5_vl", *, seed: int = 0, dtype: str = "float32", **fields: Any
) -> Path:
    """Write one with random weights, its tokenizer and its image processor to `directory`; returns it. `fields`: see
    `build_seeing_model`. The same arguments give the same bytes. Raises ConfigError for an unknown architecture."""
    tokenizer = seeing_tokenizer()
    model = build_seeing_model(tokenizer, architecture, seed=seed, dtype=dtype, **fields)
    vary_vectors(model, seed)
    save_seeing_model(model, tokenizer, directory)
    return Path(directory)


def build_seeing_model(
    tokenizer: PreTrainedTokenizerFast,
    architecture: str,
    *,
    seed: int,
    dtype: str = "float32",
    hidden_size: int = 64,
    layers: int = 2,
    depth: int = 2,
    vision_hidden_size: int = 32,
    tie_word_embeddings: bool = False,
) -> PreTrainedModel:
    """A freshly initialised model with `layers` in its language model and `depth` in its vision tower."""
    import torch
    import transformers

    if architecture not in ARCHITECTURES:
        raise ConfigError(f"unknown architecture {architecture!r}.{did_you_mean(architecture, ARCHITECTURES)}")
    start, end, picture, video = (tokenizer.get_vocab()[token] for token in SEEN_TOKENS)
    of_text = {
        "vocab_size": VOCAB_SIZE + len(SEEN_TOKENS),
        "hidden_size": hidden_size,
        "intermediate_size": 2 * hidden_size,
        "num_hidden_layers": layers,
        "num_attention_heads": hidden_size // 32,
        "num_key_value_heads": max(hidden_size // 64, 1),
        "head_dim": 32,
        "max_position_embeddings": 1024,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0, "mrope_section": [6, 5, 5]},
        "tie_word_embeddings": tie_word_embeddings,
        "bos_token_id": None,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }
    of_vision: dict[str, Any] = {"depth": depth, "num_heads": 2, "patch_size": PATCH, "spatial_merge_size": MERGE}
    if architecture == "qwen2_vl":
        of_vision |= {"embed_dim": vision_hidden_size, "hidden_size": hidden_size, "mlp_ratio": 2}
        of_vision["in_chans"] = 3  # as published: transformers reads `in_channels`, SGLang this
    else:
        of_vision |= {"hidden_size": vision_hidden_size, "intermediate_size": 64, "out_hidden_size": hidden_size}
    if architecture == "qwen2_5_vl":
        of_vision |= {"window_size": 4 * PATCH, "fullatt_block_indexes": [depth - 1]}
    if architecture == "qwen3_vl":
        of_vision |= {"num_position_embeddings": 64, "deepstack_visual_indexes": [0]}
        of_text["rope_parameters"]["mrope_interleaved"] = True
    config = transformers.AutoConfig.for_model(
        architecture,
        text_config=of_text,
        vision_config=of_vision,
        image_token_id=picture,
        video_token_id=video,
        vision_start_token_id=start,
        vision_end_token_id=end,
        tie_word_embeddings=tie_word_embeddings,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        auto: Any = transformers.AutoModelForImageTextToText
        model: PreTrainedModel = auto.from_config(config, dtype=getattr(torch, dtype))
    return model


def save_seeing_model(model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, directory: str | Path) -> None:
    """Save the model with an image processor that makes 1 to `MOST_TOKENS` tokens of a picture."""
    save_model(model, tokenizer, directory)
    area = (PATCH * MERGE) ** 2
    described = {
        "image_processor_type": "Qwen2VLImageProcessor",
        "patch_size": PATCH,
        "merge_size": MERGE,
        "temporal_patch_size": 2,
        "size": {"shortest_edge": area, "longest_edge": MOST_TOKENS * area},
        "image_mean": [0.5, 0.5, 0.5],
        "image_std": [0.5, 0.5, 0.5],
    }
    (Path(directory) / "preprocessor_config.json").write_text(json.dumps(described, indent=2) + "\n", "utf-8")
