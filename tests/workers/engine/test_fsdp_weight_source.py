from __future__ import annotations

import itertools
import re

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.debug import CommDebugMode
from transformers import AutoModelForCausalLM

from tests.workers.engine.engine_cases import (
    assemble,
    batch,
    checkpoint_weights,
    held_parts,
    make_engine,
    weighted_loss,
)
from verl.checkpoint_engine.errors import PlanError
from verl.checkpoint_engine.plan.types import Box, Shard
from verl.workers.engine.fsdp.fsdp2 import FSDP2Sharding
from verl.workers.engine.fsdp.weight_source import FSDPWeightSource
from verl.workers.engine.micro_batches import MicroBatchLimits

WHOLE = MicroBatchLimits(max_sequences=100)


def specs_and_parts(path, options):
    engine = make_engine(path, **options)
    return engine.weight_source("bfloat16").specs(), held_parts(engine, "bfloat16")


def how_often_each_element_is_held(specs, parts_by_rank):
    counts = {spec.name: torch.zeros(spec.shape, dtype=torch.int64) for spec in specs}
    for name, box, _ in (part for parts in parts_by_rank for part in parts):
        counts[name][tuple(slice(a, b) for a, b in zip(box.start, box.stop, strict=True))] += 1
    return counts


@pytest.mark.cells(3)
@pytest.mark.parametrize(
    ("strategy", "world_size"), [("fsdp2", 2), ("fsdp2", 3), ("fsdp", 1), ("fsdp", 2), ("fsdp", 3)]
)
@pytest.mark.parametrize(
    ("architecture", "tied"),
    [("qwen2", True), ("qwen2", False), ("qwen3", False), ("qwen3", True), ("llama", False), ("qwen3_moe", False)],
)
def test_the_shards_of_all_ranks_are_the_cast_checkpoint_without_gap_or_overlap(
    ranks, models, architecture, tied, strategy, world_size
):
    path = models(architecture, tied)
    results = ranks.run(specs_and_parts, world_size, path, {"strategy": strategy})
    specs = results[0][0]
    assert all(other == specs for other, _ in results)

    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    expected = {name: value.bfloat16() for name, value in checkpoint_weights(model).items()}
    assert [spec.name for spec in specs] == list(expected)
    assert ("lm_head.weight" in expected) is not tied
    assert all(spec.shape == expected[spec.name].shape and spec.dtype == "bfloat16" for spec in specs)

    counts = how_often_each_element_is_held(specs, [parts for _, parts in results])
    assert all(bool((count == 1).all()) for count in counts.values())
    whole = assemble([parts for _, parts in results])
    for name, value in expected.items():
        assert torch.equal(whole[name], value), name


def test_a_rank_without_rows_of_a_tensor_declares_no_shard_of_it(ranks, models):
    """Four rows over three ranks are two, two and none."""
    results = ranks.run(specs_and_parts, 3, models("qwen3"), {})
    holders = [{name for name, _, _ in parts} for _, parts in results]
    norm = "model.layers.0.self_attn.q_norm.weight"
    assert [norm in names for names in holders] == [True, True, False]


def test_a_rank_that_holds_whole_experts_declares_all_of_those_and_nothing_of_others(ranks, models):
    """Four experts over three ranks are two, two and none."""
    results = ranks.run(specs_and_parts, 3, models("qwen3_moe"), {})
    shapes = {spec.name: spec.shape for spec in results[0][0]}
    expert = re.compile(r"model\.layers\.1\.mlp\.experts\.(\d)\.(\w+)_proj\.weight")
    held = [
        {found.groups(): box for name, box, _ in parts if (found := expert.fullmatch(name))} for _, parts in results
    ]
    matrices = [set(itertools.product(experts, ("gate", "up", "down"))) for experts in ("01", "23", "")]
    assert [boxes.keys() for boxes in held] == matrices
    for (number, matrix), box in (item for boxes in held for item in boxes.items()):
        assert box == Box.whole(shapes[f"model.layers.1.mlp.experts.{number}.{matrix}_proj.weight"])


def test_a_flat_range_begins_and_ends_inside_rows_and_leaves_tensors_out(ranks, models):
    results = ranks.run(specs_and_parts, 3, models("qwen3"), {"strategy": "fsdp"})
    shapes = {spec.name: spec.shape for spec in results[0][0]}
    held = [{(name, box) for name, box, _ in parts} for _, parts in results]
    cut = [name for name, box in set().union(*held) if len(box.start) == 2 and box.shape[1] < shapes[name][1]]
    assert cut
    assert all({name for name, _ in boxes} < shapes.keys() for boxes in held)


@pytest.mark.parametrize("strategy", ["fsdp2", "fsdp"])
def test_ranks_that_replicate_each_other_declare_the_same_shards(ranks, models, strategy):
    options = {"strategy": strategy, "fsdp": {"fsdp_size": 1}}
    (specs, first), (_, second) = ranks.run(specs_and_parts, 2, models("llama"), options)
    assert [part[:2] for part in first] == [part[:2] for part in second]
    counts = how_often_each_element_is_held(specs, [first, second])
    assert all(bool((count == 2).all()) for count in counts.values())


def use_alone(path, strategy):
    """Rank 0 uses its source while rank 1 does nothing: a collective would wait for rank 1 and time out."""
    engine = make_engine(path, strategy=strategy)
    result = None
    if dist.get_rank() == 0:
        with pytest.MonkeyPatch.context() as patches, CommDebugMode() as communication:
            for cls, name in ((DTensor, "full_tensor"), (DTensor, "redistribute"), (torch.nn.Module, "state_dict")):
                patches.setattr(cls, name, None)
            parts = held_parts(engine, "bfloat16")
        result = communication.get_total_counts(), len(parts)
    dist.barrier()
    return result


@pytest.mark.parametrize("strategy", ["fsdp2", "fsdp"])
def test_nothing_communicates_or_gathers(ranks, models, strategy):
    count, num_parts = ranks.run(use_alone, 2, models("qwen2"), strategy)[0]
    assert count == 0
    assert num_parts > 0


def copy_parts_of_a_shard(path):
    engine = make_engine(path)
    source = engine.weight_source("bfloat16")
    shard = next(shard for shard in source.shards() if shard.name == "model.layers.1.mlp.up_proj.weight")
    (first, _), (last, num_columns) = shard.box.start, shard.box.stop
    whole = torch.empty(shard.box.shape, dtype=torch.bfloat16)
    source.copy(shard, whole)
    inner = Box((first + 1, 3), (last - 2, num_columns - 1))
    strided = torch.zeros(inner.shape[1], inner.shape[0], dtype=torch.bfloat16).T
    source.copy(Shard(shard.name, inner), strided)
    errors = []
    for wrong in (Shard(shard.name, Box((first - 1, 0), (last, num_columns))), Shard("no.such.weight", shard.box)):
        try:
            source.copy(wrong, whole)
        except PlanError as exc:
            errors.append(str(exc))
    return whole, strided, errors


def test_a_part_of_a_shard_is_copied_into_strided_memory_and_what_is_not_held_is_refused(ranks, models):
    whole, strided, errors = ranks.run(copy_parts_of_a_shard, 2, models("qwen2"))[1]
    assert torch.equal(strided, whole[1:-2, 3:-1])
    assert len(errors) == 2
    assert "no.such.weight" in errors[1]


def view_parts_of_a_shard(path, strategy):
    engine = make_engine(path, strategy=strategy)
    source, cast = engine.weight_source("float32"), engine.weight_source("bfloat16")
    shard = next(shard for shard in source.shards() if len(shard.box.shape) == 2 and min(shard.box.shape) > 1)
    (first, _), (last, num_columns) = shard.box.start, shard.box.stop
    copied = torch.empty(shard.box.shape)
    source.copy(shard, copied)
    columns = Shard(shard.name, Box((first, 1), (last, num_columns)))
    return copied, source.view(shard).clone(), source.view(columns), cast.view(shard)


@pytest.mark.parametrize("strategy", ["fsdp", "fsdp2"])
def test_what_is_sent_as_it_lies_is_shown_and_nothing_else(ranks, models, strategy):
    copied, shown, strided, cast = ranks.run(view_parts_of_a_shard, 2, models("qwen2"), strategy)[1]
    assert torch.equal(shown, copied)
    assert (strided, cast) == (None, None)


def follow_training(path, strategy):
    """Gathered parameters are kept after forward: the source must not see them."""
    engine = make_engine(path, strategy=strategy, fsdp={"reshard_after_forward": False})
    source = engine.weight_source("float32")
    shard = source.shards()[0]
    before, after = torch.empty(shard.box.shape), torch.empty(shard.box.shape)
    source.copy(shard, before)
    data = batch(4).chunk(dist.get_world_size())[dist.get_rank()]
    engine.train_mini_batch(data, weighted_loss, temperature=1.0, limits=WHOLE)
    with torch.no_grad():
        engine.model(input_ids=data.batch["input_ids"], attention_mask=data.batch["attention_mask"])
    source.copy(shard, after)
    again = engine.weight_source("float32")
    fresh = torch.empty(shard.box.shape)
    again.copy(shard, fresh)
    return again.shards() == source.shards(), before, after, fresh


@pytest.mark.parametrize("strategy", ["fsdp2", "fsdp"])
def test_a_source_sees_every_later_step_whatever_is_gathered(ranks, models, strategy):
    for same_shards, before, after, fresh in ranks.run(follow_training, 2, models("qwen2"), strategy):
        assert same_shards
        assert not torch.equal(before, after)
        assert torch.equal(after, fresh)


def test_a_model_that_is_not_sharded_is_held_whole_and_its_persistent_buffers_keep_their_dtype():
    model = torch.nn.BatchNorm1d(3)
    source = FSDPWeightSource(FSDP2Sharding().held(model), rollout_dtype="bfloat16")
    assert {spec.name: (spec.shape, spec.dtype) for spec in source.specs()} == {
        "weight": ((3,), "bfloat16"),
        "bias": ((3,), "bfloat16"),
        "running_mean": ((3,), "float32"),
        "running_var": ((3,), "float32"),
        "num_batches_tracked": ((), "int64"),
    }
    assert Shard("num_batches_tracked", Box((), ())) in source.shards()
    copied = torch.full((), -1)
    source.copy(Shard("num_batches_tracked", Box((), ())), copied)
    assert copied == 0
