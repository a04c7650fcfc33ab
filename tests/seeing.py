"""Tiny models of every family that sees, with the tokens and the processor that its checkpoints have.

The processor is what `AutoProcessor` reads from such a directory; nothing is downloaded.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from verl.utils.builtin.seeing import ARCHITECTURES, make_tiny_seeing_model
from verl.utils.builtin.tiny import save_model, vary_vectors
from verl.utils.builtin.tokenizer import CHAT_TEMPLATE, VOCAB_SIZE, build_tokenizer
from verl.utils.language_model import WRAPPERS, choose_part
from verl.utils.pictures import PictureProcessor, load_processor

Config = dict[str, Any]

HIDDEN, WINDOW, PATCH = 64, 8, 14
_TEXT: Config = {
    "hidden_size": HIDDEN,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "max_position_embeddings": 1024,
    "bos_token_id": None,
}
_MROPE: Config = {"rope_type": "default", "rope_theta": 10_000.0, "mrope_section": [6, 5, 5]}
_PARTLY_MROPE: Config = {
    "rope_type": "default",
    "rope_theta": 10_000.0,
    "mrope_section": [3, 3, 2],
    "mrope_interleaved": True,
    "partial_rotary_factor": 0.5,
}
_EXPERTS: Config = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48}
_DELTA_NET: Config = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "layer_types": ["linear_attention", "full_attention"],
}
_WINDOWS: Config = {"sliding_window": WINDOW, "layer_types": ["sliding_attention", "full_attention"]}
_TOWER: Config = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2}
_QWEN_TOWER: Config = {
    "depth": 2,
    "num_heads": 2,
    "patch_size": PATCH,
    "spatial_merge_size": 2,
    "hidden_size": 32,
    "intermediate_size": 64,
    "out_hidden_size": HIDDEN,
    "num_position_embeddings": 64,
}
_HALVES: Config = {"image_mean": [0.5, 0.5, 0.5], "image_std": [0.5, 0.5, 0.5]}
_QWEN_PICTURES: Config = {
    "patch_size": PATCH,
    "merge_size": 2,
    "temporal_patch_size": 2,
    "size": {"shortest_edge": 28 * 28, "longest_edge": 16 * 28 * 28},
    **_HALVES,
}


@dataclass(frozen=True, kw_only=True)
class Family:
    """What a tiny model of it is made of."""

    text: Config
    vision: Config
    tokens: dict[str, str]
    """Its special tokens, by the name of the tokenizer's attribute."""
    ids: dict[str, str]
    """Fields of the configuration: which token's id each is."""
    image_processor: str
    pictures: Config
    """Of `preprocessor_config.json`."""
    more: Config = field(default_factory=dict)
    """Of the configuration."""
    processor: Config = field(default_factory=dict)
    """Of `processor_config.json`."""
    mark: str = ""
    """What the chat template writes for a picture; empty: its `image_token`."""
    contrast: float = 1.0
    """By which the last layer of the tower is scaled: pictures then matter more than what bfloat16 rounds."""
    words: tuple[str, ...] = ()
    """Tokens of text that vLLM's own processor asks for."""
    names: dict[str, str] = field(default_factory=dict)
    """How names of tensors begin in transformers, and in published checkpoints, which vLLM reads alone."""
    transposed: str = ""
    """In the names of tensors of which published checkpoints have the last two dimensions in the other order."""


_QWEN_TOKENS = {
    "image_token": "<|image_pad|>",
    "video_token": "<|video_pad|>",
    "vision_start_token": "<|vision_start|>",
    "vision_end_token": "<|vision_end|>",
}
_QWEN_IDS = {
    "image_token_id": "image_token",
    "video_token_id": "video_token",
    "vision_start_token_id": "vision_start_token",
    "vision_end_token_id": "vision_end_token",
}


def _qwen(text: Config, *, transposed: str = "", contrast: float = 1.0, **vision: Any) -> Family:
    return Family(
        contrast=contrast,
        transposed=transposed,
        text=text,
        vision=_QWEN_TOWER | vision,
        tokens=_QWEN_TOKENS,
        ids=_QWEN_IDS,
        image_processor="Qwen2VLImageProcessor",
        pictures=_QWEN_PICTURES,
        mark="<|vision_start|><|image_pad|><|vision_end|>",
    )


_GEMMA_TOKENS = {"image_token": "<image_soft_token>", "boi_token": "<start_of_image>", "eoi_token": "<end_of_image>"}
_LLAVA: Config = {"patch_size": PATCH, "vision_feature_select_strategy": "default", "num_additional_image_tokens": 1}
_PUBLISHED = {"vision_tower.": "vision_tower.vision_model."}
_CLIP: Config = _TOWER | {"model_type": "clip_vision_model", "image_size": 56, "patch_size": PATCH}

FAMILIES: dict[str, Family] = {
    "qwen3_vl_moe": _qwen(
        _TEXT | _EXPERTS | {"norm_topk_prob": True, "rope_parameters": _MROPE | {"mrope_interleaved": True}},
        deepstack_visual_indexes=[0],
        transposed=".mlp.experts.",
    ),
    "glm4v": Family(
        text=_TEXT | {"attention_bias": True, "rope_parameters": _MROPE | {"partial_rotary_factor": 1.0}},
        vision=_QWEN_TOWER | {"image_size": 112, "intermediate_size": 48},
        tokens={
            "image_token": "<|image|>",
            "video_token": "<|video|>",
            "image_start_token": "<|begin_of_image|>",
            "image_end_token": "<|end_of_image|>",
            "video_start_token": "<|begin_of_video|>",
            "video_end_token": "<|end_of_video|>",
        },
        ids={
            f"{name}_token_id": f"{name}_token"
            for name in ("image", "video", "image_start", "image_end", "video_start", "video_end")
        },
        image_processor="Glm4vImageProcessor",
        pictures=_QWEN_PICTURES | {"size": {"shortest_edge": 2 * 28 * 28, "longest_edge": 2 * 16 * 28 * 28}},
        mark="<|begin_of_image|><|image|><|end_of_image|>",
    ),
    "internvl": Family(
        text=_TEXT | {"model_type": "qwen2", "num_attention_heads": 2},
        vision=_TOWER | {"image_size": [56, 56], "patch_size": [PATCH, PATCH]},
        tokens={
            "context_image_token": "<IMG_CONTEXT>",
            "start_image_token": "<img>",
            "end_image_token": "</img>",
            "video_token": "<video>",
        },
        ids={"image_token_id": "context_image_token"},
        image_processor="GotOcr2ImageProcessor",
        pictures={
            "size": {"height": 56, "width": 56},
            "crop_to_patches": True,
            "min_patches": 1,
            "max_patches": 3,
            **_HALVES,
        },
        more={"image_seq_length": 4, "downsample_ratio": 0.5, "tie_word_embeddings": False},
        processor={"image_seq_length": 4},
        mark="<IMG_CONTEXT>",
    ),
    "llava": Family(
        text=_TEXT | {"model_type": "llama"},
        vision=_CLIP,
        tokens={"image_token": "<image>"},
        ids={"image_token_index": "image_token"},
        image_processor="CLIPImageProcessor",
        pictures={"size": {"shortest_edge": 56}, "crop_size": {"height": 56, "width": 56}},
        more={"image_seq_length": 16},
        processor=_LLAVA,
        names=_PUBLISHED,
    ),
    "llava_next": Family(
        text=_TEXT | {"model_type": "llama"},
        vision=_CLIP,
        tokens={"image_token": "<image>"},
        ids={"image_token_index": "image_token"},
        image_processor="LlavaNextImageProcessor",
        pictures={
            "size": {"shortest_edge": 56},
            "crop_size": {"height": 56, "width": 56},
            "image_grid_pinpoints": [[56, 112], [112, 56], [112, 112]],
        },
        more={"image_grid_pinpoints": [[56, 112], [112, 56], [112, 112]], "image_seq_length": 16},
        processor=_LLAVA,
        names=_PUBLISHED,
    ),
    "smolvlm": Family(
        text=_TEXT | {"model_type": "llama"},
        vision=_TOWER | {"image_size": 56, "patch_size": PATCH},
        tokens={
            "image_token": "<image>",
            "fake_image_token": "<fake_token_around_image>",
            "global_image_token": "<global-img>",
            "end_of_utterance_token": "<end_of_utterance>",
        },
        ids={"image_token_id": "image_token"},
        image_processor="SmolVLMImageProcessor",
        pictures={
            "size": {"longest_edge": 112},
            "max_image_size": {"longest_edge": 56},
            "do_image_splitting": True,
            **_HALVES,
        },
        more={"scale_factor": 2},
        processor={"image_seq_len": 4},
    ),
    "mistral3": Family(
        text=_TEXT | {"model_type": "ministral3"},
        vision=_TOWER | {"model_type": "pixtral", "image_size": 112, "patch_size": PATCH, "head_dim": 16},
        tokens={"image_token": "[IMG]", "image_break_token": "[IMG_BREAK]", "image_end_token": "[IMG_END]"},
        ids={"image_token_index": "image_token"},
        image_processor="PixtralImageProcessor",
        pictures={"size": {"longest_edge": 112}, "patch_size": PATCH},
        more={"spatial_merge_size": 2, "tie_word_embeddings": False, "vision_feature_layer": -1},
        processor={"patch_size": PATCH, "spatial_merge_size": 2},
    ),
    "gemma3": Family(
        text=_TEXT | _WINDOWS | {"query_pre_attn_scalar": 24},
        vision=_TOWER
        | {"model_type": "siglip_vision_model", "image_size": 56, "patch_size": PATCH, "vision_use_head": False},
        tokens=_GEMMA_TOKENS,
        ids={"image_token_index": "image_token", "boi_token_index": "boi_token", "eoi_token_index": "eoi_token"},
        image_processor="Gemma3ImageProcessor",
        pictures={"size": {"height": 56, "width": 56}, **_HALVES},
        more={"mm_tokens_per_image": 4},
        processor={"image_seq_length": 4},
        mark="<start_of_image>",
        words=("\n", "\n\n", "\n\n\n", "\n\n\n\n"),
        names=_PUBLISHED,
    ),
    "qwen3_5": _qwen(_TEXT | _DELTA_NET | {"rope_parameters": _PARTLY_MROPE}, contrast=16.0),
    "qwen3_5_moe": _qwen(
        _TEXT | _EXPERTS | _DELTA_NET | {"shared_expert_intermediate_size": 64, "rope_parameters": _PARTLY_MROPE},
        contrast=16.0,
    ),
    "gemma4": Family(
        text=_TEXT
        | _WINDOWS
        | {"global_head_dim": 64, "use_bidirectional_attention": "vision"}
        | {"hidden_size_per_layer_input": 16, "vocab_size_per_layer_input": VOCAB_SIZE + 7},
        vision=_TOWER
        | {
            "head_dim": 16,
            "num_key_value_heads": 2,
            "patch_size": PATCH,
            "pooling_kernel_size": 2,
            "position_embedding_size": 64,
            "default_output_length": 70,
        },
        tokens={
            "image_token": "<|image|>",
            "boi_token": "<|image>",
            "eoi_token": "<image|>",
            "audio_token": "<|audio|>",
            "boa_token": "<|audio>",
            "eoa_token": "<audio|>",
            "video_token": "<|video|>",
        },
        ids={
            "image_token_id": "image_token",
            "boi_token_id": "boi_token",
            "eoi_token_id": "eoi_token",
            "video_token_id": "video_token",
            "audio_token_id": "audio_token",
            "boa_token_id": "boa_token",
            "eoa_token_index": "eoa_token",
        },
        image_processor="Gemma4ImageProcessor",
        pictures={"patch_size": PATCH, "pooling_kernel_size": 2, "max_soft_tokens": 70},
        processor={"image_seq_length": 70},
    ),
}
"""Beside the `ARCHITECTURES` that come with the project."""

ALL = (*ARCHITECTURES, *FAMILIES)


def processor_of(directory: Path) -> PictureProcessor:
    """What prompts and pictures become for the whole model in `directory`."""
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(directory)
    if config.model_type in WRAPPERS:
        choose_part(config, False, "asked")
    processor = load_processor(directory, config)
    assert processor is not None
    return processor


def as_a_whole(name: str) -> Config:
    """Options of a model of the family that make it see."""
    return {"language_model_only": False} if name in WRAPPERS else {}


NEED_TORCHVISION = ("smolvlm", "mistral3", "gemma4")
"""Transformers does not load their processors without it; that of smolvlm wants num2words, too, which is beside it."""


def make_seeing(directory: Path, name: str, *, seed: int = 0) -> Path:
    """Write a model of the family with random weights, its tokenizer and its processor; returns `directory`."""
    if name in ARCHITECTURES:
        return make_tiny_seeing_model(directory, name, seed=seed)
    import torch
    import transformers

    family = FAMILIES[name]
    tokenizer: Any = build_tokenizer(1024)
    tokenizer.add_special_tokens({"additional_special_tokens": list(family.tokens.values())})
    tokenizer.add_tokens(list(family.words))
    mark = family.mark or family.tokens["image_token"]
    parts = (
        "{%- if message['content'] is string %}{{ message['content'] }}{% else %}{% for part in message['content'] %}"
        f"{{%- if part['type'] == 'image' %}}{mark}{{% else %}}{{{{ part['text'] }}}}{{% endif %}}{{%- endfor %}}"
        "{% endif %}"
    )
    tokenizer.chat_template = CHAT_TEMPLATE.replace("{{ message['content'] }}", parts)
    vocabulary = tokenizer.get_vocab()
    ends = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    of_text = {"vocab_size": VOCAB_SIZE + len(family.tokens) + len(family.words)} | ends | family.text
    config = transformers.AutoConfig.for_model(
        name,
        text_config=of_text,
        vision_config=family.vision,
        **{key: vocabulary[family.tokens[token]] for key, token in family.ids.items()},
        **family.more,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        auto: Any = transformers.AutoModelForImageTextToText
        model = auto.from_config(config, dtype=torch.float32)
        with torch.no_grad():
            for name_of, parameter in model.named_parameters():
                if name_of.endswith("merger.linear_fc2.weight"):
                    parameter.mul_(family.contrast)
                if not parameter.any():  # gemma3's projector, through which no picture would be seen
                    parameter.normal_(0.0, 0.1)
    vary_vectors(model, seed)
    save_model(model, tokenizer, directory)
    _publish(directory / "model.safetensors", family)
    file = directory / "tokenizer_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | family.tokens, indent=2) + "\n")
    described = {"image_processor_type": family.image_processor, **family.pictures}
    (directory / "preprocessor_config.json").write_text(json.dumps(described, indent=2) + "\n")
    (directory / "processor_config.json").write_text(json.dumps(family.processor, indent=2) + "\n")
    return directory


def _publish(file: Path, family: Family) -> None:
    """Write the tensors as published checkpoints of the family have them."""
    from safetensors.torch import load_file, save_file

    tensors = {}
    for name, tensor in load_file(file).items():
        start = next((start for start in family.names if name.startswith(start)), "")
        transposed = family.transposed and family.transposed in name
        written = tensor.transpose(-1, -2).contiguous() if transposed else tensor
        tensors[family.names.get(start, "") + name.removeprefix(start)] = written
    save_file(tensors, file, metadata={"format": "pt"})
