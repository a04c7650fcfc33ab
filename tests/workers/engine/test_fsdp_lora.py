"""LoRA on FSDP2: only adapters are trained, and what is sent is the merged model."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from peft import PeftModel
from safetensors.torch import load_file
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.debug import CommDebugMode
from transformers import AutoModelForCausalLM

from tests.models import cases
from tests.workers.engine.engine_cases import (
    LEARNING_RATE,
    assemble,
    batch,
    checkpoint_weights,
    held_parts,
    make_engine,
    own_rows,
    reference_log_probs,
    weighted_loss,
    write_with_shared_attention,
)
from verl.checkpoint_engine.plan.types import Box, Shard
from verl.utils.config import ConfigError, from_mapping
from verl.workers.config import HFModelConfig
from verl.workers.config.model import LoRAConfig
from verl.workers.engine.fsdp.model import adapter_shapes
from verl.workers.engine.micro_batches import MicroBatchLimits
from verl.workers.losses import LossTotals

WHOLE = MicroBatchLimits(max_sequences=100)
LORA = {"lora_rank": 3, "lora_alpha": 12}
CONTENTS = ("model", "optimizer", "extra")


def train(engine, seeds):
    for seed in seeds:
        rows = batch(12, seed).chunk(dist.get_world_size())[dist.get_rank()]
        metrics = engine.train_mini_batch(rows, weighted_loss, temperature=1.0, limits=WHOLE)
        engine.step_lr()
    return metrics


def log_probs(engine, data):
    rows = data.chunk(dist.get_world_size())[dist.get_rank()]
    return engine.compute_log_prob(rows, temperature=1.0, limits=WHOLE)[0]


def adapters_of(directory):
    return (directory / "lora_adapter/adapter_model.safetensors").read_bytes()


def train_and_save(path, directory, data, model, contents=CONTENTS):
    engine = make_engine(path, model=LORA | model)
    initial = held_parts(engine)
    train(engine, range(2))
    trained, in_rollout_dtype = held_parts(engine), held_parts(engine, "bfloat16")
    scores = log_probs(engine, data)
    engine.save_checkpoint(directory, (*contents, "hf_model"))
    train(engine, range(2, 4))
    return initial, trained, in_rollout_dtype, scores, held_parts(engine)


def load_and_go_on(path, directory, model):
    engine = make_engine(path, model=LORA | model)
    engine.load_checkpoint(directory, CONTENTS)
    loaded = held_parts(engine)
    train(engine, range(2, 4))
    return loaded, held_parts(engine)


def same(found, expected):
    return [part[:2] for part in found] == [part[:2] for part in expected] and all(
        torch.equal(one[2], other[2]) for one, other in zip(found, expected, strict=True)
    )


@pytest.mark.parametrize(
    ("architecture", "tied", "world_size", "model"),
    [("qwen2", True, 2, {}), ("qwen3_moe", False, 3, {"enable_gradient_checkpointing": True})],
)
def test_what_is_sent_is_what_peft_merges_and_an_exported_adapter_is_pefts(
    ranks, models, tmp_path, architecture, tied, world_size, model
):
    path, data, directory = models(architecture, tied), batch(12), tmp_path / "step"
    results = ranks.run(train_and_save, world_size, path, directory, data, model)
    base = checkpoint_weights(AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32))
    initial, trained, sent = (assemble([result[place] for result in results]) for place in range(3))
    assert initial.keys() == base.keys()
    assert all(torch.equal(initial[name], base[name]) for name in base), "a new adapter adds nothing"

    adapted = {name for name in base if "_proj." in name and "experts" not in name and name.endswith("weight")}
    assert {name for name in base if not torch.equal(trained[name], base[name])} == adapted

    adapter = directory / "lora_adapter"
    loaded = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32), adapter)
    with torch.no_grad():
        expected, _ = reference_log_probs(loaded, data, 1.0)
    torch.testing.assert_close(torch.cat([result[3] for result in results]), expected)
    merged = checkpoint_weights(loaded.merge_and_unload())
    for name, value in merged.items():
        torch.testing.assert_close(trained[name], value, rtol=1e-6, atol=1e-7)
        # One rounding: to the nearest, from a sum in float32 whose last bits depend on the order of its terms.
        torch.testing.assert_close(sent[name], value.bfloat16(), rtol=2**-8, atol=0.0)
        assert (sent[name] != value.bfloat16()).float().mean() < 0.01, name
    exported = checkpoint_weights(AutoModelForCausalLM.from_pretrained(directory / "huggingface"))
    assert exported.keys() == trained.keys()
    for name, value in exported.items():
        torch.testing.assert_close(value, trained[name], rtol=1e-6, atol=1e-7)

    resumed = ranks.run(load_and_go_on, world_size, path, directory, model)
    for (_, saved, _, _, final), (found, same_final) in zip(results, resumed, strict=True):
        assert same(found, saved)
        assert same(same_final, final)


def test_steps_equal_those_of_peft_in_one_process(ranks, models, tmp_path):
    path, directory = models("qwen3"), tmp_path / "new"
    ranks.run(new_adapter, 2, path, directory)
    model = PeftModel.from_pretrained(
        AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32), directory / "lora_adapter", is_trainable=True
    )
    optimizer = torch.optim.AdamW(
        [parameter for parameter in model.parameters() if parameter.requires_grad], lr=LEARNING_RATE, weight_decay=0.01
    )
    for seed in range(2):
        data = batch(12, seed)
        log_prob, _ = reference_log_probs(model, data, 1.0)
        loss, _ = weighted_loss(log_prob, None, data, LossTotals.of(data.batch["response_mask"]))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    expected = checkpoint_weights(model.merge_and_unload())
    found = assemble([result[1] for result in ranks.run(train_and_save, 2, path, tmp_path / "step", data, {})])
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=1e-4, atol=1e-4)


def gradients(path, data, directory, model):
    """Of the sum of log-probs, whole, and the model's new adapters, if it has any."""
    engine = make_engine(path, model=model)
    if model:
        engine.save_checkpoint(directory, ("model",))
    return cases.gradients(engine, own_rows(data))


@pytest.mark.parametrize("model", [{}, LORA], ids=["whole", "lora"])
@pytest.mark.parametrize("name", ["zamba", "zamba2"])
def test_layers_that_share_their_attention_have_the_gradients_of_one_process(ranks, tmp_path, name, model):
    path, directory, data = tmp_path / "model", tmp_path / "new", batch(12)
    write_with_shared_attention(path, name)
    for found in ranks.run(gradients, 2, path, data, directory, model):
        alone = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
        if model:
            alone = PeftModel.from_pretrained(alone, directory / "lora_adapter", is_trainable=True)
        (-reference_log_probs(alone, data, 1.0)[0].sum()).backward()
        expected = {
            each.replace("base_model.model.", ""): parameter.grad
            for each, parameter in alone.named_parameters()
            if parameter.requires_grad
        }
        assert cases.other_gradients(found, expected) == {}


def new_adapter(path, directory):
    make_engine(path, model=LORA).save_checkpoint(directory, ("model",))


def test_the_adapters_do_not_depend_on_the_number_of_ranks_and_a_checkpoint_loads_into_any(ranks, models, tmp_path):
    path, directory = models("qwen3"), tmp_path / "step"
    saved = ranks.run(train_and_save, 2, path, directory, batch(12), {})
    loaded = ranks.run(load_and_go_on, 3, path, directory, {})
    at_save, at_load = assemble([result[1] for result in saved]), assemble([result[0] for result in loaded])
    for name, value in at_save.items():
        torch.testing.assert_close(at_load[name], value, rtol=1e-6, atol=1e-7)
    for ranks_of_run in (1, 3):
        ranks.run(new_adapter, ranks_of_run, path, tmp_path / f"new-{ranks_of_run}")
    assert adapters_of(tmp_path / "new-1") == adapters_of(tmp_path / "new-3") != adapters_of(directory)


def publish_alone(path):
    """Without a collective, in pieces that are cut anywhere; rank 1 does nothing meanwhile."""
    engine = make_engine(path, model=LORA)
    train(engine, range(2))
    source, result = engine.weight_source("float32"), None
    if dist.get_rank() == 0:
        name = "model.layers.1.self_attn.k_proj.weight"
        (shard,) = (shard for shard in source.shards() if shard.name == name)
        whole, pieced = torch.empty(shard.box.shape), torch.empty(shard.box.shape)
        with CommDebugMode() as collectives, pytest.MonkeyPatch.context() as patch:
            patch.setattr(DTensor, "full_tensor", lambda self: pytest.fail("gathered"))
            source.copy(shard, whole)
            (first, _), (last, columns) = shard.box.start, shard.box.stop
            for box in (
                Box((first, 0), (first + 1, columns)),
                Box((first + 1, 0), (last, 5)),
                Box((first + 1, 5), (last, columns)),
            ):
                part = (slice(box.start[0] - first, box.stop[0] - first), slice(box.start[1], box.stop[1]))
                source.copy(Shard(name, box), pieced[part])
        result = whole, pieced, collectives.get_total_counts()
    dist.barrier()
    return result


def test_a_rank_merges_any_piece_of_its_rows_alone(ranks, models):
    whole, pieced, collectives = ranks.run(publish_alone, 2, models("qwen2"))[0]
    torch.testing.assert_close(pieced, whole)
    assert collectives == 0


def train_adapters(path, directory):
    engine = make_engine(path, model=LORA | {"lora": LoRAConfig(merge=False)})
    train(engine, range(2))
    engine.save_checkpoint(directory, ("model",))
    with CommDebugMode() as collectives:
        parts = held_parts(engine)
    return parts, collectives.get_total_counts()


def test_adapters_are_sent_alone_as_peft_names_them_and_each_rank_sends_what_it_holds(ranks, models, tmp_path):
    path = models("qwen2")
    results = ranks.run(train_adapters, 3, path, tmp_path)
    assert [collectives for _, collectives in results] == [0] * 3
    sent = assemble([parts for parts, _ in results])
    exported = load_file(tmp_path / "lora_adapter/adapter_model.safetensors")
    assert sent.keys() == exported.keys()
    assert [name for name, tensor in exported.items() if not torch.equal(sent[name], tensor)] == []
    config = HFModelConfig(path=str(path), **LORA)
    assert sorted(adapter_shapes(config).values()) == sorted(tuple(tensor.shape) for tensor in exported.values())


def error_of_building(path, options):
    with pytest.raises(ConfigError) as caught:
        make_engine(path, **options)
    return str(caught.value)


@pytest.mark.parametrize(
    ("architecture", "options", "parts"),
    [
        ("qwen2", {"model": LORA | {"target_modules": ["q_prj"]}}, ["q_prj", "not found"]),
        ("qwen2", {"model": LORA | {"target_modules": ["q_proj", "k_prj"]}}, ["no linear layer k_prj"]),
        ("qwen2", {"model": LORA | {"lora_rank": 10**9}}, ["lora_rank=1000000000 is more than", "highest rank"]),
        ("qwen2", {"model": LORA | {"target_modules": ["embed_tokens"]}}, ["not model.embed_tokens"]),
        ("qwen2", {"model": LORA | {"target_modules": ["lm_head"]}}, ["not lm_head"]),
        ("qwen3_moe", {"model": LORA | {"target_modules": ["gate_proj"]}}, ["target_modules=['gate_proj']"]),
        ("qwen2", {"model": LORA, "strategy": "fsdp"}, ["strategy=fsdp ", "fsdp2"]),
    ],
)
def test_what_cannot_have_adapters_is_refused(ranks, models, architecture, options, parts):
    (message,) = ranks.run(error_of_building, 1, models(architecture, True), options)
    assert [part for part in parts if part not in message] == []


def error_of_loading(path, directory, model):
    engine = make_engine(path, model=model)
    with pytest.raises(ConfigError) as caught:
        engine.load_checkpoint(directory, CONTENTS)
    return str(caught.value)


def test_a_checkpoint_of_other_adapters_or_of_a_whole_model_is_refused(ranks, models, tmp_path):
    path, directory = models("qwen2"), tmp_path / "step"
    ranks.run(train_and_save, 1, path, directory, batch(12), {})
    for model in (LORA | {"lora_rank": 4}, LORA | {"target_modules": ["o_proj"]}, {}):
        assert "adapters" in ranks.run(error_of_loading, 1, path, directory, model)[0]


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"lora_rank": -1}, "lora_rank must be at least 0"),
        ({"lora_alpha": 0}, "lora_alpha must be at least 1"),
        ({"lora_rank": 1, "target_modules": []}, "names no layer"),
    ],
)
def test_a_configuration_that_cannot_be_delivered_is_refused(values, message):
    with pytest.raises(ConfigError, match=message):
        from_mapping(HFModelConfig, values)
