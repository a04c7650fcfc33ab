"""Between checkpoints and models: by transformers' own rules, and by name where they do not fit."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.models.architectures import ARCHITECTURES
from verl.checkpoint_engine.errors import PlanError
from verl.workers.hf.conversion import Conversion, conversion_of

LAYER = "model.layers.1."


@pytest.fixture(scope="module")
def on_meta():
    """`on_meta(name)`: a model of the matrix without memory."""

    def make(name: str):
        with torch.device("meta"):
            return AutoModelForCausalLM.from_config(ARCHITECTURES[name].make_config())

    return make


def single_experts(model) -> dict[str, tuple[int, ...]]:
    """Shapes of the checkpoint that is usual for Qwen3-MoE."""
    shapes = {}
    for name, tensor in model.state_dict().items():
        shape = tuple(tensor.shape)
        layer, _, last = name.rpartition(".")
        for expert in range(shape[0]):
            if last == "gate_up_proj":
                half = (shape[1] // 2, shape[2])
                shapes |= {f"{layer}.{expert}.{matrix}_proj.weight": half for matrix in ("gate", "up")}
            elif last == "down_proj":
                shapes[f"{layer}.{expert}.down_proj.weight"] = shape[1:]
        if last not in ("gate_up_proj", "down_proj"):
            shapes[name] = shape
    return shapes


def own_shapes(model) -> dict[str, tuple[int, ...]]:
    return {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}


def test_a_model_that_is_named_as_its_checkpoint_is_made_of_whole_tensors(on_meta):
    model = on_meta("llama")
    conversion = conversion_of(model, own_shapes(model))
    conversion.require_whole()
    assert list(conversion.shapes) == list(own_shapes(model))
    assert all(len(pieces) == 1 and pieces[0].origin == name for name, pieces in conversion.pieces.items())


def test_experts_are_boxes_of_the_stack_in_the_order_in_which_it_holds_them(on_meta):
    model = on_meta("qwen3_moe")
    conversion = conversion_of(model, single_experts(model))
    conversion.require_whole()
    (target, piece), *rest = conversion.parts_of(f"{LAYER}mlp.experts.2.up_proj.weight")
    assert not rest
    stack = tuple(model.state_dict()[target].shape)
    assert target == f"{LAYER}mlp.experts.gate_up_proj"
    assert piece.box.start == (2, stack[1] // 2, 0)
    assert piece.box.stop == (3, stack[1], stack[2])
    own = [name for name in conversion.shapes if name.startswith(f"{LAYER}mlp.experts.") and "down" not in name]
    assert own[:3] == [f"{LAYER}mlp.experts.{name}_proj.weight" for name in ("0.gate", "0.up", "1.gate")]


def test_experts_that_the_file_stacks_stay_stacked(on_meta):
    model = on_meta("qwen3_moe")
    conversion = conversion_of(model, own_shapes(model))
    conversion.require_whole()
    assert f"{LAYER}mlp.experts.gate_up_proj" in conversion.shapes


def test_what_is_made_of_each_other_is_one_group(on_meta):
    model = on_meta("qwen3_moe")
    shapes = single_experts(model)
    groups = list(conversion_of(model, shapes).groups())
    assert sorted(name for _, origins in groups for name in origins) == sorted(shapes)
    (stack,) = [origins for targets, origins in groups if targets == (f"{LAYER}mlp.experts.down_proj",)]
    assert set(stack) == {name for name in shapes if name.startswith(f"{LAYER}mlp.experts.") and "down" in name}


def test_a_checkpoint_of_the_base_model_has_its_own_names(on_meta):
    model = on_meta("llama-base")
    shapes = {name.removeprefix("model."): shape for name, shape in own_shapes(model).items() if "lm_head" not in name}
    conversion = conversion_of(model, shapes)
    conversion.require_whole()
    assert conversion.shapes.keys() == shapes.keys()


def test_a_tied_head_in_the_file_is_a_copy_of_the_embedding(on_meta):
    model = on_meta("llama-base")
    conversion = conversion_of(model, own_shapes(model))
    assert conversion.copies == {"lm_head.weight": "model.embed_tokens.weight"}
    assert "lm_head.weight" not in conversion.shapes


@pytest.mark.parametrize(
    "name", ["mtp.layers.0.norm.weight", "model.layers.9.mlp.up_proj.weight", "visual.patch.weight"]
)
def test_a_module_that_the_model_has_not_is_left_aside(on_meta, name):
    model = on_meta("llama")
    conversion = conversion_of(model, own_shapes(model) | {name: (3, 3)})
    conversion.require_whole()
    assert conversion.aside == (name,)


def without(name):
    return lambda shapes: shapes.pop(name)


def renamed(old, new):
    return lambda shapes: shapes.update({new: shapes.pop(old)})


def reshaped(name, shape):
    return lambda shapes: shapes.update({name: shape})


@pytest.mark.parametrize(
    ("edit", "texts"),
    [
        (without("model.norm.weight"), ["in the model only: model.norm.weight"]),
        (
            renamed("model.norm.weight", "model.extra.weight"),
            ["model only: model.norm", "checkpoint only: model.extra"],
        ),
        (reshaped(f"{LAYER}mlp.gate.bias", (4,)), [f"in the checkpoint only: {LAYER}mlp.gate.bias"]),
        (reshaped(f"{LAYER}self_attn.extra.weight", (4,)), [f"in the checkpoint only: {LAYER}self_attn.extra.weight"]),
        (without(f"{LAYER}mlp.experts.1.up_proj.weight"), [f"{LAYER}mlp.experts.1.up_proj.weight"]),
        (without(f"{LAYER}mlp.experts.3.down_proj.weight"), [f"{LAYER}mlp.experts.3.down_proj.weight"]),
        (reshaped("model.norm.weight", (63,)), ["model.norm.weight: (64,) in the model, (63,) in the checkpoint"]),
        (reshaped(f"{LAYER}mlp.experts.1.up_proj.weight", (5, 7)), [f"{LAYER}mlp.experts", "(5, 7)"]),
    ],
)
def test_what_does_not_fit_is_named_as_the_checkpoint_names_it(on_meta, edit, texts):
    model = on_meta("qwen3_moe")
    shapes = single_experts(model)
    edit(shapes)
    with pytest.raises(PlanError) as failure:
        conversion_of(model, shapes).require_whole()
    for text in texts:
        assert text in str(failure.value)


def test_a_missing_tensor_that_the_caller_makes_itself_is_no_fault(on_meta):
    model = on_meta("llama")
    shapes = own_shapes(model)
    del shapes["lm_head.weight"]
    conversion: Conversion = conversion_of(model, shapes, may_lack={"lm_head.weight"})
    conversion.require_whole()
    assert "lm_head.weight" not in conversion.pieces
