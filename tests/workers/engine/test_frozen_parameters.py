"""What a model class freezes is computed with, sent and saved, and not trained."""

from __future__ import annotations

import json
import shutil

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file

from tests.workers.engine.engine_cases import (
    assemble,
    assert_same_weights,
    batch,
    held_parts,
    make_engine,
    reference_steps,
    weighted_loss,
)
from tests.workers.engine.frozen_model import FROZEN
from verl.workers.engine.micro_batches import MicroBatchLimits

SMALL = MicroBatchLimits(max_tokens=24)
CONTENTS = ("model", "optimizer", "extra")
MODEL = {"external_lib": "tests.workers.engine.frozen_model"}


@pytest.fixture(scope="module")
def directory(models, tmp_path_factory):
    path = shutil.copytree(models("llama"), tmp_path_factory.mktemp("frozen") / "model")
    config = json.loads((path / "config.json").read_text())
    config |= {"model_type": "frozen_llama", "architectures": ["FrozenLlama"]}
    (path / "config.json").write_text(json.dumps(config))
    return path


def step(engine, seed: int) -> None:
    data = batch(8, seed)
    own = data.chunk(dist.get_world_size())[dist.get_rank()]
    engine.train_mini_batch(own, weighted_loss, temperature=0.7, limits=SMALL, calculate_entropy=True)


def two_steps(path, strategy, folder):
    """What is sent, what is frozen and what is exported after them, and a third step taken twice, as resumed."""
    engine = make_engine(path, strategy=strategy, model=MODEL, grad_clip=0.5)
    step(engine, 0)
    step(engine, 1)
    parts = held_parts(engine)
    remembered = {name: tensor.clone() for name, tensor in engine.snapshot().items()}
    engine.save_checkpoint(folder, CONTENTS)
    engine.export_hf(folder / "export", "float32")
    step(engine, 2)
    third = held_parts(engine)
    engine.restore(remembered)
    step(engine, 2)
    restored = held_parts(engine)
    resumed = make_engine(path, strategy=strategy, model=MODEL, grad_clip=0.5)
    resumed.load_checkpoint(folder, CONTENTS)
    step(resumed, 2)
    return parts, third, restored, held_parts(resumed)


@pytest.mark.parametrize("strategy", ["fsdp2", "fsdp"])
@pytest.mark.parametrize("world_size", [1, 2])
def test_steps_are_those_of_a_plain_loop_with_the_same_parameters_frozen(
    ranks, directory, tmp_path, strategy, world_size
):
    results = ranks.run(two_steps, world_size, directory, strategy, tmp_path)
    after = assemble([parts for parts, *_ in results])
    _, _, expected = reference_steps(
        directory, [batch(8, 0), batch(8, 1)], temperature=0.7, grad_clip=0.5, frozen=FROZEN
    )
    assert_same_weights(after, expected)
    before = load_file(directory / "model.safetensors")
    assert all(torch.equal(after[name], before[name]) for name in FROZEN)
    exported = load_file(tmp_path / "export" / "model.safetensors")
    assert exported.keys() == before.keys()
    assert all(torch.equal(exported[name], value) for name, value in after.items())
    _, third, restored, resumed = zip(*results, strict=True)
    assert_same_bits(assemble(restored), assemble(third))
    assert_same_bits(assemble(resumed), assemble(third))


def assert_same_bits(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    assert [name for name, value in expected.items() if not torch.equal(found[name], value)] == []


def with_adapters(path):
    engine = make_engine(path, model=MODEL | {"lora_rank": 2})
    return [name for name, parameter in engine.model.named_parameters() if parameter.requires_grad]


def test_adapters_beside_what_is_frozen_are_trained_alone(ranks, directory):
    (trained,) = ranks.run(with_adapters, 1, directory)
    assert any("up_proj.lora_A" in name for name in trained)
    assert all("lora_" in name for name in trained)
