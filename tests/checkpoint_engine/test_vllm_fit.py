"""What is told about checkpoints that do not fit a mixture of experts, by vLLM's own loaders, without an engine."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.checkpoint_engine.fit_process import Checkpoint
from tests.models.architectures import ARCHITECTURES, write_checkpoint
from tests.warm_workers import WarmWorkers, written_by
from verl.checkpoint_engine import ActivationError
from verl.utils.builtin import make_tiny_model

pytestmark = pytest.mark.vllm

MOE = "model.layers.0.mlp."
EXPERTS = f"{MOE}experts."
STACKS = f"{EXPERTS}routed_experts."


def without(checkpoint: Checkpoint, prefix: str) -> Checkpoint:
    rest = {name: tensor for name, tensor in checkpoint.items() if not name.startswith(prefix)}
    assert len(rest) < len(checkpoint)
    return rest


def with_shape(checkpoint: Checkpoint, name: str, shape: list[int]) -> Checkpoint:
    assert checkpoint[name][1] != shape
    return checkpoint | {name: ("float32", shape)}


def cases(whole: Checkpoint) -> dict[str, tuple[Checkpoint, list[str]]]:
    """Damaged checkpoints, and the problems that have to be told about each: these and no other."""
    up, down = f"{EXPERTS}0.up_proj.weight", f"{EXPERTS}3.down_proj.weight"
    some_w13, some_w2 = (f"some experts of {STACKS}{name}_weight are missing" for name in ("w13", "w2"))
    return {
        "nothing is wrong": (whole, []),
        "an expert is missing": (without(whole, f"{EXPERTS}2."), [some_w13, some_w2]),
        "a first matrix of an expert is missing": (without(whole, f"{EXPERTS}1.gate_proj"), [some_w13]),
        "the second matrix of an expert is missing": (without(whole, f"{EXPERTS}1.down_proj"), [some_w2]),
        "all experts of a layer are missing": (
            without(whole, EXPERTS),
            [f"{STACKS}w13_weight is missing", f"{STACKS}w2_weight is missing"],
        ),
        "there is one more expert": (
            whole | {f"{EXPERTS}4.up_proj.weight": whole[up]},
            [f"{EXPERTS}4.up_proj.weight is of no expert of the model"],
        ),
        "an expert has too few rows": (with_shape(whole, down, [32, 64]), [some_w2]),
        "an expert has too few columns": (with_shape(whole, up, [64, 32]), [some_w13]),
        "an expert has too many columns": (
            with_shape(whole, up, [64, 128]),
            [f"{up} [64, 128] is refused by {STACKS}w13_weight [4, 128, 64] ("],
        ),
        "the router has rows for other experts": (
            with_shape(whole, f"{MOE}gate.weight", [8, 64]),
            [f"{MOE}gate.weight [8, 64] is refused by {MOE}gate.weight [4, 64] ("],
        ),
        "an expert is quantized": (
            whole | {up: ("int8", whole[up][1])},
            [f"{up} {whole[up][1]} is int8, and its place in {STACKS}w13_weight [4, 128, 64] is float32"],
        ),
        "the router is missing": (without(whole, f"{MOE}gate.weight"), [f"{MOE}gate.weight is missing"]),
    }


def test_every_problem_with_experts_is_told_and_no_other(tmp_path: Path, warm: WarmWorkers):
    model = make_tiny_model(tmp_path / "model", "qwen3_moe")
    assert_told(model, cases(shapes_of(model)), tmp_path, warm)


def test_what_a_loader_leaves_out_in_silence_is_told_unless_no_text_needs_it(tmp_path: Path, warm: WarmWorkers):
    """vLLM's class of ERNIE 4.5 has no biases."""
    model = tmp_path / "model"
    write_checkpoint(ARCHITECTURES["ernie4_5"], model)
    whole = shapes_of(model)
    plain = {name: found for name, found in whole.items() if not name.endswith(".bias")}
    biases = sorted(whole.keys() - plain.keys())
    head, rotary = "lm_head.weight", "model.layers.0.self_attn.rotary_emb.inv_freq"
    embedding, mlp = plain["model.embed_tokens.weight"], "model.layers.0.mlp.up_proj.weight"
    assert biases
    assert head not in plain
    told = {
        "biases": (whole, [f"{name} {whole[name][1]} is left out, also from disk" for name in biases]),
        "a table that layers make anew": (plain | {rotary: ("float32", [8])}, []),
        "a head that may be the embedding": (plain | {head: embedding}, []),
        "weights of integers": (
            plain | {mlp: ("int8", plain[mlp][1]), "model.norm.weight": ("bool", plain["model.norm.weight"][1])},
            [
                f"{mlp} {plain[mlp][1]} is int8, and its place in {mlp.replace('up_proj', 'gate_up_proj')} [",
                f"model.norm.weight {plain['model.norm.weight'][1]} is bool, and its place in model.norm.weight [",
            ],
        ),
        "floats of other widths": (plain | {mlp: ("float64", plain[mlp][1])}, []),
        "a head of another dtype": (plain | {head: ("bfloat16", embedding[1])}, [f"{head} {embedding[1]} is left out"]),
    }
    assert_told(model, told, tmp_path, warm)


def test_a_part_of_a_layer_of_pictures_is_told_where_the_model_has_the_layer():
    from verl.checkpoint_engine.engines.vllm.fit import _Trial

    class Sees(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.visual = torch.nn.ModuleDict({"norm": torch.nn.Linear(3, 2, bias=False)})

        def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
            held: dict[str, Any] = dict(self.named_parameters())
            for name, tensor in weights:
                if name in held:
                    held[name].weight_loader(held[name], tensor)
            return set(held)

    of_model = SimpleNamespace(quantization=None, hf_text_config=SimpleNamespace(num_hidden_layers=1))
    config = SimpleNamespace(model_config=of_model, parallel_config=SimpleNamespace(tensor_parallel_size=1))
    norm, bias, other = "visual.norm.weight", "visual.norm.bias", "visual.other.weight"
    whole: Checkpoint = {norm: ("float32", [2, 3]), bias: ("float32", [2]), other: ("float32", [4])}
    for tensors, left_out in ((whole, {bias}), (without(whole, norm), set())):
        with torch.device("meta"):
            trial = _Trial(Sees(), config)
            trial.load_all(tensors)
        assert trial.left_out(tensors) == left_out


def shapes_of(model: Path) -> Checkpoint:
    return {name: ("float32", list(tensor.shape)) for name, tensor in load_file(model / "model.safetensors").items()}


def assert_told(
    model: Path, damaged: dict[str, tuple[Checkpoint, list[str]]], tmp_path: Path, warm: WarmWorkers
) -> None:
    checkpoints = tmp_path / "checkpoints.json"
    checkpoints.write_text(json.dumps([checkpoint for checkpoint, _ in damaged.values()]))
    written = written_by(warm, "tests.checkpoint_engine.fit_process", model, checkpoints)
    answers: list[str | None] = json.loads(written.splitlines()[-1])
    assert len(answers) == len(damaged)
    for (case, (_, expected)), answer in zip(damaged.items(), answers, strict=True):
        found = answer.partition(" problems: ")[2].split("; ") if answer else []
        assert len(found) == len(expected), (case, answer)
        assert [problem for problem in expected if not any(one.startswith(problem) for one in found)] == [], case


def test_a_worker_that_cannot_find_out_says_so_to_all_and_none_waits_for_it():
    from verl.checkpoint_engine.engines.vllm.fit import Fit, fit_of

    unknown = fit_of(object(), {})
    told = Fit("Known", ("something is missing",)).together([unknown])
    assert "AttributeError" in told.unknown
    with pytest.raises(ActivationError, match="cannot find out whether the checkpoint fits .*: AttributeError"):
        told.require({})
