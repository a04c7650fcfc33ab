"""How Hugging Face checkpoints and Megatron's `GPTModel` name and cut the same tensors, as data. No torch.

One table per architecture. Loading, export, checkpoints and the weight source all read it through `layout.pieces`; a
new architecture is one more entry of `ARCHITECTURES`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from verl.utils.config import ConfigError, did_you_mean


class Cut(Enum):
    """How tensor-parallel ranks divide a Megatron tensor, and how Hugging Face tensors are arranged in it."""

    WHOLE = "whole"
    """Every rank has all of it."""
    ROWS = "rows"
    """An equal part of the rows of each tensor, one after the other (gate above up)."""
    COLUMNS = "columns"
    """An equal part of the columns."""
    VOCABULARY = "vocabulary"
    """An equal part of the rows, after rows were added that stand for no token."""
    QUERY_GROUPS = "query groups"
    """Of q, k and v an equal part of the query groups; of each group first its q rows, then its k, then its v."""


class Place(Enum):
    """The pipeline stages that have a tensor."""

    FIRST = "first stage"
    LAYER = "the stage of its layer"
    LAST = "last stage"
    LAST_COPY = "last stage, as a copy of what the first has; where they are the same stage there is no copy"


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One tensor of Megatron and the Hugging Face tensors that form it.

    `{layer}` stands for the layer's index in the whole model on the Hugging Face side, and among the layers of the
    stage on Megatron's; `{expert}` likewise for experts, of which a rank has some.
    """

    megatron: str
    hugging_face: Mapping[str, tuple[str, ...]]
    """Name -> shape, in fields of `Dimensions`."""
    cut: Cut = Cut.WHOLE
    place: Place = Place.LAYER
    gradient_is_partial: bool = False
    """Every tensor-parallel rank has the whole tensor and uses it for its own heads, so gradients must be summed."""
    is_adapter: bool = False
    """Whether it is a trained adapter beside a frozen weight."""

    @property
    def is_expert(self) -> bool:
        return "{expert}" in self.megatron


@dataclass(frozen=True, slots=True, kw_only=True)
class Architecture:
    """`model_type` of a Hugging Face config."""

    rows: tuple[Row, ...]
    fixed: Mapping[str, Any] = field(default_factory=dict)
    """Fields of the config that must have this value, or be absent."""

    @property
    def is_moe(self) -> bool:
        return any(row.is_expert for row in self.rows)

    def has(self, suffix: str) -> bool:
        """Whether a tensor of Megatron has this name."""
        return any(row.megatron.endswith(suffix) for row in self.rows)


_LAYER = "model.layers.{layer}."
_LOCAL = "decoder.layers.{layer}."

EMBEDDING_NAME = "model.embed_tokens.weight"
_EMBEDDING = {EMBEDDING_NAME: ("vocab", "hidden")}
_ENDS = (
    Row(megatron="embedding.word_embeddings.weight", hugging_face=_EMBEDDING, cut=Cut.VOCABULARY, place=Place.FIRST),
    Row(megatron="decoder.final_layernorm.weight", hugging_face={"model.norm.weight": ("hidden",)}, place=Place.LAST),
)
HEAD = Row(
    megatron="output_layer.weight",
    hugging_face={"lm_head.weight": ("vocab", "hidden")},
    cut=Cut.VOCABULARY,
    place=Place.LAST,
)
TIED_HEAD = Row(megatron="output_layer.weight", hugging_face=_EMBEDDING, cut=Cut.VOCABULARY, place=Place.LAST_COPY)
VALUE_HEAD = (
    Row(megatron="output_layer.weight", hugging_face={"score.weight": ("labels", "hidden")}, place=Place.LAST),
    Row(megatron="output_layer.bias", hugging_face={"score.bias": ("labels",)}, place=Place.LAST),
)
"""The head of a critic. A policy's checkpoint lacks it, and it starts at zero then."""
TIED_NAME = "lm_head.weight"
"""The name under which a checkpoint may repeat tied embeddings."""

_ATTENTION = (
    Row(
        megatron=f"{_LOCAL}input_layernorm.weight",
        hugging_face={f"{_LAYER}input_layernorm.weight": ("hidden",)},
    ),
    Row(
        megatron=f"{_LOCAL}self_attention.linear_qkv.weight",
        hugging_face={
            f"{_LAYER}self_attn.q_proj.weight": ("q", "hidden"),
            f"{_LAYER}self_attn.k_proj.weight": ("kv", "hidden"),
            f"{_LAYER}self_attn.v_proj.weight": ("kv", "hidden"),
        },
        cut=Cut.QUERY_GROUPS,
    ),
    Row(
        megatron=f"{_LOCAL}self_attention.linear_proj.weight",
        hugging_face={f"{_LAYER}self_attn.o_proj.weight": ("hidden", "q")},
        cut=Cut.COLUMNS,
    ),
    Row(
        megatron=f"{_LOCAL}pre_mlp_layernorm.weight",
        hugging_face={f"{_LAYER}post_attention_layernorm.weight": ("hidden",)},
    ),
)
_QKV_BIAS = (
    Row(
        megatron=f"{_LOCAL}self_attention.linear_qkv.bias",
        hugging_face={
            f"{_LAYER}self_attn.q_proj.bias": ("q",),
            f"{_LAYER}self_attn.k_proj.bias": ("kv",),
            f"{_LAYER}self_attn.v_proj.bias": ("kv",),
        },
        cut=Cut.QUERY_GROUPS,
    ),
)
_QK_NORMS = tuple(
    Row(
        megatron=f"{_LOCAL}self_attention.{part}_layernorm.weight",
        hugging_face={f"{_LAYER}self_attn.{part}_norm.weight": ("head_dim",)},
        gradient_is_partial=True,
    )
    for part in "qk"
)


def _mlp(megatron: str, hugging_face: str, width: str) -> tuple[Row, ...]:
    return (
        Row(
            megatron=f"{megatron}linear_fc1.weight",
            hugging_face={
                f"{hugging_face}gate_proj.weight": (width, "hidden"),
                f"{hugging_face}up_proj.weight": (width, "hidden"),
            },
            cut=Cut.ROWS,
        ),
        Row(
            megatron=f"{megatron}linear_fc2.weight",
            hugging_face={f"{hugging_face}down_proj.weight": ("hidden", width)},
            cut=Cut.COLUMNS,
        ),
    )


_DENSE_MLP = _mlp(f"{_LOCAL}mlp.", f"{_LAYER}mlp.", "ffn")
_EXPERTS = (
    Row(megatron=f"{_LOCAL}mlp.router.weight", hugging_face={f"{_LAYER}mlp.gate.weight": ("experts", "hidden")}),
    *_mlp(f"{_LOCAL}mlp.experts.local_experts.{{expert}}.", f"{_LAYER}mlp.experts.{{expert}}.", "expert_ffn"),
)
_PLAIN = {"hidden_act": "silu", "attention_bias": False, "mlp_bias": False, "use_sliding_window": False}

ARCHITECTURES: Mapping[str, Architecture] = {
    "llama": Architecture(rows=(*_ENDS, *_ATTENTION, *_DENSE_MLP), fixed=_PLAIN),
    "qwen2": Architecture(rows=(*_ENDS, *_ATTENTION, *_QKV_BIAS, *_DENSE_MLP), fixed=_PLAIN),
    "qwen3": Architecture(rows=(*_ENDS, *_ATTENTION, *_QK_NORMS, *_DENSE_MLP), fixed=_PLAIN),
    "qwen3_moe": Architecture(
        rows=(*_ENDS, *_ATTENTION, *_QK_NORMS, *_EXPERTS),
        fixed=_PLAIN | {"decoder_sparse_step": 1, "mlp_only_layers": []},
    ),
}
"""`model_type` of the Hugging Face config -> its table, without the head: that depends on `tie_word_embeddings` and on
whether it is a critic."""


def architecture_of(model_type: str, key: str = "strategy") -> Architecture:
    """Raises ConfigError, which names `key`, for a model type without a table."""
    if model_type not in ARCHITECTURES:
        raise ConfigError(
            f"{key}=megatron has no map for model_type={model_type!r}.{did_you_mean(model_type, ARCHITECTURES)} "
            f"Known: {', '.join(ARCHITECTURES)}. To add one, give it a table in "
            f"verl/workers/engine/megatron/architectures.py (see docs/megatron.md), or train it with {key}=fsdp2"
        )
    return ARCHITECTURES[model_type]
