from __future__ import annotations

import logging

import pytest
import torch
import torch.distributed as dist
from safetensors import safe_open
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.workers.engine.engine_cases import (
    assemble,
    assert_same_weights,
    batch,
    checkpoint_weights,
    held_parts,
    make_engine,
    weighted_loss,
)
from verl.utils.config import ConfigError
from verl.workers.engine.fsdp.export import export_hf
from verl.workers.engine.micro_batches import MicroBatchLimits

WHOLE = MicroBatchLimits(max_sequences=100)
CONTENTS = ("model", "optimizer", "extra")
OPTIM = {"lr_warmup_steps": 10}


def train(engine, first_seed, steps):
    for seed in range(first_seed, first_seed + steps):
        rows = batch(12, seed).chunk(dist.get_world_size())[dist.get_rank()]
        engine.train_mini_batch(rows, weighted_loss, temperature=1.0, limits=WHOLE)
        engine.step_lr()


def save_and_go_on(path, directory, contents, strategy="fsdp2"):
    torch.manual_seed(dist.get_rank())
    engine = make_engine(path, optim=OPTIM, strategy=strategy)
    train(engine, 0, 2)
    engine.save_checkpoint(directory, contents)
    drawn = torch.rand(3)
    saved = held_parts(engine)
    train(engine, 2, 2)
    return saved, held_parts(engine), drawn


def load_and_go_on(path, directory, contents, strategy="fsdp2"):
    engine = make_engine(path, optim=OPTIM, strategy=strategy)
    records: list[logging.LogRecord] = []
    handler = logging.Handler()
    handler.emit = records.append
    logging.getLogger("verl").addHandler(handler)
    try:
        engine.load_checkpoint(directory, contents)
    finally:
        logging.getLogger("verl").removeHandler(handler)
    drawn = torch.rand(3)
    loaded = held_parts(engine)
    train(engine, 2, 2)
    return loaded, held_parts(engine), drawn, [record.getMessage() for record in records]


@pytest.mark.parametrize(
    ("architecture", "tied", "strategy"),
    [
        ("qwen2", True, "fsdp2"),
        ("qwen3", False, "fsdp2"),
        ("qwen2", True, "fsdp"),
        ("qwen3", False, "fsdp"),
        ("qwen3_moe", False, "fsdp2"),
    ],
)
def test_a_loaded_run_goes_on_bit_for_bit(ranks, models, tmp_path, architecture, tied, strategy):
    path, directory = models(architecture, tied), tmp_path / "step"
    saved = ranks.run(save_and_go_on, 2, path, directory, CONTENTS, strategy)
    loaded = ranks.run(load_and_go_on, 2, path, directory, CONTENTS, strategy)
    for (saved_parts, final_parts, drawn), (loaded_parts, same_final_parts, same_drawn, log) in zip(
        saved, loaded, strict=True
    ):
        for before, after in ((saved_parts, loaded_parts), (final_parts, same_final_parts)):
            assert all(torch.equal(old[2], new[2]) for old, new in zip(before, after, strict=True))
        assert torch.equal(drawn, same_drawn)
        assert log == []
    assert not torch.equal(saved[0][2], saved[1][2]), "every rank has random numbers of its own"


@pytest.mark.parametrize(
    ("world_size", "strategy", "new_world_size", "new_strategy"),
    [
        (2, "fsdp2", 1, "fsdp2"),
        (1, "fsdp2", 3, "fsdp2"),
        (2, "fsdp", 1, "fsdp"),
        (1, "fsdp", 3, "fsdp"),
        (3, "fsdp", 2, "fsdp2"),
        (2, "fsdp2", 3, "fsdp"),
    ],
)
def test_a_run_goes_on_with_another_number_of_ranks_or_another_strategy(
    ranks, models, tmp_path, world_size, strategy, new_world_size, new_strategy
):
    path, directory = models("qwen3"), tmp_path / "step"
    saved = ranks.run(save_and_go_on, world_size, path, directory, CONTENTS, strategy)
    loaded = ranks.run(load_and_go_on, new_world_size, path, directory, CONTENTS, new_strategy)
    at_save, at_load = assemble([result[0] for result in saved]), assemble([result[0] for result in loaded])
    assert all(torch.equal(at_save[name], at_load[name]) for name in at_save)
    # Two more steps agree only if moments and learning rate came along, too.
    final, other_final = assemble([result[1] for result in saved]), assemble([result[1] for result in loaded])
    assert_same_weights(other_final, final)
    assert all("reseeded" in log[0] for _, _, _, log in loaded)


def test_only_what_is_named_is_loaded(ranks, models, tmp_path):
    path, directory = models("qwen2"), tmp_path / "step"
    saved = ranks.run(save_and_go_on, 1, path, directory, ("model",))
    loaded = ranks.run(load_and_go_on, 1, path, directory, ("model",))
    assert all(torch.equal(old[2], new[2]) for old, new in zip(saved[0][0], loaded[0][0], strict=True))
    # Without moments the next steps are others.
    assert not all(torch.equal(old[2], new[2]) for old, new in zip(saved[0][1], loaded[0][1], strict=True))


def error_of_loading(path, directory, contents):
    with pytest.raises(ConfigError) as caught:
        make_engine(path).load_checkpoint(directory, contents)
    return str(caught.value)


def error_of_saving(path, directory):
    with pytest.raises(ConfigError) as caught:
        make_engine(path).save_checkpoint(directory, CONTENTS)
    return str(caught.value)


def test_a_directory_that_cannot_be_loaded_or_saved_to_is_named_with_the_reason(ranks, models, tmp_path):
    path, directory = models("qwen2"), tmp_path / "step"
    assert "is not a training checkpoint" in ranks.run(error_of_loading, 1, path, tmp_path, CONTENTS)[0]
    ranks.run(save_and_go_on, 1, path, directory, ("model",))
    assert "does not hold optimizer, extra.lr_step" in ranks.run(error_of_loading, 1, path, directory, CONTENTS)[0]
    assert "already holds a checkpoint" in ranks.run(error_of_saving, 1, path, directory)[0]


def train_and_export(path, directory, dtype, strategy="fsdp2", fsdp_size=-1):
    engine = make_engine(path, optim=OPTIM, strategy=strategy, fsdp={"fsdp_size": fsdp_size})
    train(engine, 0, 1)
    engine.save_checkpoint(directory, ("hf_model",))
    engine.export_hf(directory / "cast", dtype)
    export_hf(directory / "split", engine._built_model, engine._model_config, file_nbytes=10_000)
    return held_parts(engine)


@pytest.mark.parametrize(
    ("architecture", "tied", "strategy", "fsdp_size"),
    [
        ("qwen2", True, "fsdp2", -1),
        ("qwen3", False, "fsdp2", -1),
        ("qwen2", True, "fsdp", -1),
        ("qwen3", False, "fsdp", 1),
        ("qwen3_moe", False, "fsdp2", -1),
    ],
)
def test_transformers_loads_the_exported_directory(ranks, models, tmp_path, architecture, tied, strategy, fsdp_size):
    path = models(architecture, tied)
    weights = assemble(ranks.run(train_and_export, 2, path, tmp_path, "bfloat16", strategy, fsdp_size))
    for name in ("huggingface", "split"):
        loaded = AutoModelForCausalLM.from_pretrained(tmp_path / name)
        assert loaded.dtype == torch.float32
        found = checkpoint_weights(loaded)
        assert found.keys() == weights.keys()
        assert all(torch.equal(found[key], weights[key]) for key in weights)
    assert len(list((tmp_path / "split").glob("model-*-of-*.safetensors"))) > 1
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "cast").dtype == torch.bfloat16
    with safe_open(tmp_path / "huggingface" / "model.safetensors", framework="pt") as file:
        assert ("lm_head.weight" in file.keys()) is not tied  # noqa: SIM118 - safe_open is no mapping
    text = "12+34="
    assert AutoTokenizer.from_pretrained(tmp_path / "huggingface")(text) == AutoTokenizer.from_pretrained(path)(text)


@pytest.mark.parametrize("architecture", ["llama", "qwen3_moe"])
def test_an_exported_directory_is_a_model_to_train(ranks, models, tmp_path, architecture):
    path = models(architecture, True)
    weights = assemble(ranks.run(train_and_export, 2, path, tmp_path, None))
    reloaded = assemble(ranks.run(build_and_hold, 2, tmp_path / "split"))
    assert all(torch.equal(reloaded[name], weights[name]) for name in weights)


def build_and_hold(path):
    return held_parts(make_engine(path))
