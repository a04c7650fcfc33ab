"""Layers that stand for others: the plan is that of a model of which every layer was converted."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.planning.test_shapes import boxes, job
from verl.checkpoint_engine.plan.types import Box
from verl.planning import shapes
from verl.planning.alike import NotAlike, Thinned
from verl.planning.shapes import planned_model
from verl.workers.hf.conversion import Conversion
from verl.workers.hf.rearranged import Piece

DENSE = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 12,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 16,
}
MOE = {**DENSE, "num_hidden_layers": 7, "moe_intermediate_size": 16, "num_experts": 5, "num_experts_per_tok": 2}
SEEING = {"depth": 4, "hidden_size": 32, "num_heads": 2, "intermediate_size": 48, "out_hidden_size": 32}
CONFIGS: dict[str, tuple[dict[str, Any], int]] = {
    "tied": ({"model_type": "qwen2", **DENSE, "tie_word_embeddings": True}, 10),
    "experts and dense layers": ({"model_type": "qwen3_moe", **MOE, "mlp_only_layers": [0, 2, 6]}, 3),
    "fused experts": ({"model_type": "gpt_oss", **MOE, "num_local_experts": 4}, 5),
    "latent attention, from fp8": (
        {
            "model_type": "deepseek_v3",
            **MOE,
            "n_routed_experts": 12,
            "n_group": 1,
            "topk_group": 1,
            "first_k_dense_replace": 3,
            "kv_lora_rank": 8,
            "q_lora_rank": 8,
            "qk_rope_head_dim": 8,
            "v_head_dim": 16,
            "qk_nope_head_dim": 8,
            "quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]},
        },
        1 + 2,
    ),
    "a layer in two of another kind": (
        {
            "model_type": "qwen3_next",
            **MOE,
            "num_hidden_layers": 12,
            "shared_expert_intermediate_size": 16,
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 2,
            "linear_key_head_dim": 16,
            "linear_value_head_dim": 16,
        },
        1 + 7,
    ),
    "a tower that sees": (
        {
            "model_type": "qwen2_5_vl",
            "text_config": {"model_type": "qwen2_5_vl_text", **DENSE, "num_hidden_layers": 4},
            "vision_config": SEEING,
        },
        2 + 2,
    ),
}


@pytest.mark.parametrize("name", CONFIGS)
def test_a_plan_from_some_layers_is_that_of_all(name: str, tmp_path: Path):
    fields, removed = CONFIGS[name]
    path = tmp_path / "config.json"
    path.write_text(json.dumps(fields))
    config = shapes._config(path)[0]
    thinned = Thinned.of(shapes._model_of(config))
    assert sum(len(kind.numbers) - 2 for kind in thinned.kinds) == removed
    whole, conversion = shapes._whole(config)
    _, of_some, names = shapes._thinned(config)
    assert len(of_some.shapes) < len(names) == len(conversion.shapes)
    buffers = dict(whole.named_buffers())
    ranks = 3
    model = planned_model(path, job(ranks))
    assert list(model.layout.specs) == list(shapes._specs(whole, conversion, "bfloat16"))
    for rank in range(ranks):
        expected = set()
        for target, tensor in whole.state_dict().items():
            rows = torch.arange(tensor.shape[0])
            chunks = (rows,) * ranks if target in buffers else rows.chunk(ranks)
            if rank < len(chunks):
                low, high = int(chunks[rank][0]), int(chunks[rank][-1]) + 1
                held = Box((low, *(0,) * (tensor.dim() - 1)), (high, *tensor.shape[1:]))
                found = [piece.narrowed(held) for piece in conversion.pieces.get(target, ())]
                expected |= {(piece.origin, piece.origin_box) for piece in found if piece}
        assert boxes(model.held[rank], model.layout) == expected


class Layers(nn.Module):
    def __init__(self, *sizes: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(size, 2, bias=False) for size in sizes)


def converted(names: dict[str, str]) -> Conversion:
    """Each tensor of a model is the one of another name in its checkpoint."""
    pieces = {
        own: (Piece(box=Box.whole((2, 2)), origin=name, start=(0, 0), dims=(0, 1)),) for own, name in names.items()
    }
    return Conversion(model="Layers", pieces=pieces, shapes=dict.fromkeys(names.values(), (2, 2)), copies={}, aside=())


def test_names_of_removed_layers_have_their_number_in_the_models_order():
    model = Layers(2, 3, 2, 2, 3, 2)
    thinned = Thinned.of(model)
    own = [f"layers.{number}.weight" for number in (0, 1, 4, 5)]
    assert list(model.state_dict()) == own
    found = thinned.names(converted({name: f"h.{name.split('.')[1]}.w.0" for name in own}))
    assert found == {
        "h.0.w.0": "h.0.w.0",
        "h.1.w.0": "h.1.w.0",
        "h.2.w.0": "h.0.w.0",
        "h.3.w.0": "h.0.w.0",
        "h.4.w.0": "h.4.w.0",
        "h.5.w.0": "h.5.w.0",
    }
    assert list(found) == sorted(found)


@pytest.mark.parametrize(
    ("first", "last"),
    [
        ("h.1.w", "h.4.w"),
        ("h.0.w", "h.3.v"),
        ("h.0.0.w", "h.3.3.w"),
        ("h0.w", "h3.w"),
        ("all.w", "all.w"),
    ],
)
def test_layers_whose_names_do_not_tell_their_number_stand_for_none(first: str, last: str):
    thinned = Thinned.of(Layers(2, 2, 2, 2))
    with pytest.raises(NotAlike):
        thinned.names(converted({"layers.0.weight": first, "layers.3.weight": last}))


def test_layers_that_share_a_parameter_are_all_kept():
    model = Layers(2, 2, 2, 2)
    model.layers[2].weight = model.layers[0].weight
    assert not Thinned.of(model).kinds
    assert len(model.layers) == 4
