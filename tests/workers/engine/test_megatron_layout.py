"""What every Megatron rank holds of random models in random layouts: all ranks play in this process, in turn."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import Phase, assume, given, settings
from hypothesis import strategies as st

from verl.checkpoint_engine.plan.layout import Layout
from verl.checkpoint_engine.plan.shards import ShardTable
from verl.checkpoint_engine.plan.sync_plan import make_plan
from verl.workers.engine.fsdp.weight_source import FSDPWeightSource
from verl.workers.engine.megatron.architectures import ARCHITECTURES
from verl.workers.engine.megatron.held import held_tensors
from verl.workers.engine.megatron.layout import Dimensions, ParallelSizes, local_tensors, tensor_shapes


@st.composite
def cases(draw):
    """(architecture, dimensions, sizes) that fit each other, of at most 8 ranks."""
    architecture = ARCHITECTURES[draw(st.sampled_from(sorted(ARCHITECTURES)))]
    tensor, pipeline, data = (draw(st.sampled_from([1, 2, 3, 4])) for _ in range(3))
    assume(tensor * pipeline * data <= 8)
    block = tensor * data  # ranks of one stage
    expert, expert_tensor = 1, tensor
    if architecture.is_moe:
        expert = draw(st.sampled_from([size for size in range(1, block + 1) if block % size == 0]))
        rest = block // expert
        expert_tensor = draw(st.sampled_from([size for size in range(1, rest + 1) if rest % size == 0]))
    groups = tensor * draw(st.integers(1, 2))
    each, first, last = draw(st.integers(1, 2)), None, None
    layers = pipeline * each
    if pipeline > 1 and draw(st.booleans()):
        first = draw(st.integers(1, 3))
        layers += first - each
    vocab, labels = draw(st.integers(1, 20)), draw(st.integers(0, 1))
    dims = Dimensions(
        layers=layers,
        vocab=vocab,
        padded_vocab=-(-vocab // tensor) * tensor + draw(st.integers(0, 2)) * tensor,
        hidden=draw(st.integers(1, 4)),
        heads=groups * draw(st.integers(1, 3)),
        groups=groups,
        head_dim=draw(st.integers(1, 3)),
        ffn=tensor * draw(st.integers(1, 3)),
        experts=expert * draw(st.integers(1, 2)) if architecture.is_moe else 0,
        expert_ffn=expert_tensor * draw(st.integers(1, 2)),
        tied=not labels and draw(st.booleans()),
        labels=labels,
    )
    return (
        architecture,
        dims,
        ParallelSizes(
            world=block * pipeline,
            tensor=tensor,
            pipeline=pipeline,
            expert=expert,
            expert_tensor=expert_tensor,
            first_stage_layers=first,
            last_stage_layers=last,
        ),
    )


def source_of(architecture, dims, sizes, rank, values) -> FSDPWeightSource:
    """The source of a rank whose local tensors hold their part of `values`."""
    tensors = list(local_tensors(architecture, dims, sizes, rank))
    weights = {}
    for tensor in tensors:
        shape = [max(sides) for sides in zip(*(piece.local_box.stop for piece in tensor.pieces), strict=True)]
        weights[tensor.name] = torch.full(shape or [0], float("nan"))
    held = held_tensors(architecture, dims, tensors, weights, dict.fromkeys((False, True), torch.float32))
    for name, tensor in held.items():
        for part in tensor.parts:
            part.values().copy_(values[name][tuple(map(slice, part.box.start, part.box.stop))])
    # Nothing of a fused tensor is left out, and no two pieces of it lie on each other.
    assert all(not bool(weight.isnan().any()) for weight in weights.values())
    assert sum(weight.numel() for weight in weights.values()) == sum(
        part.box.numel for tensor in held.values() for part in tensor.parts
    )
    return FSDPWeightSource(held, rollout_dtype="float32")


@settings(deadline=None, max_examples=60, phases=[Phase.generate])
@given(case=cases(), block_nbytes=st.sampled_from([8, 60, 10_000]))
def test_the_planned_pieces_of_all_ranks_are_the_model_with_every_element_once(case, block_nbytes):
    architecture, dims, sizes = case
    values, first = {}, 0
    for name, shape in tensor_shapes(architecture, dims).items():
        values[name] = torch.arange(first, first + math.prod(shape), dtype=torch.float32).reshape(shape)
        first += math.prod(shape)
    sources = [source_of(architecture, dims, sizes, rank, values) for rank in range(sizes.world)]
    layout = Layout.of(sources[0].specs())
    assert all(tuple(source.specs()) == layout.specs for source in sources)
    plan = make_plan(layout, [ShardTable.of(layout, source.shards()) for source in sources], block_nbytes=block_nbytes)

    copied = {name: torch.full(tensor.shape, float("nan")) for name, tensor in values.items()}
    times = {name: torch.zeros_like(tensor) for name, tensor in copied.items()}
    for owner, source in enumerate(sources):
        for shard in plan.shards_of(owner):
            part = tuple(map(slice, shard.box.start, shard.box.stop))
            source.copy(shard, copied[shard.name][part])
            times[shard.name][part] += 1
    for name, tensor in values.items():
        assert bool((times[name] == 1).all()), name
        assert torch.equal(copied[name], tensor), name
    assert sum(plan.nbytes_of(owner) for owner in range(plan.num_owners)) == layout.payload_nbytes


@settings(deadline=None, max_examples=30, phases=[Phase.generate])
@given(case=cases())
def test_as_many_ranks_hold_a_local_tensor_as_it_says(case):
    architecture, dims, sizes = case
    holders: dict[tuple, int] = {}
    said: dict[tuple, int] = {}
    for rank in range(sizes.world):
        for tensor in local_tensors(architecture, dims, sizes, rank):
            if key := tuple((piece.name, piece.box) for piece in tensor.pieces):
                holders[key] = holders.get(key, 0) + 1
                said[key] = tensor.replicas
    assert holders == said


def test_query_groups_lie_in_megatrons_order():
    """Four heads in two groups over two ranks: of the second, rows 2 and 3 of q, then the second of k and of v."""
    dims = Dimensions(layers=1, vocab=2, padded_vocab=2, hidden=1, heads=4, groups=2, head_dim=1, ffn=2, tied=True)
    tensors = local_tensors(ARCHITECTURES["qwen3"], dims, ParallelSizes(world=2, tensor=2), 1)
    (qkv,) = (tensor for tensor in tensors if tensor.name.endswith("linear_qkv.weight"))
    found = [(piece.name.split(".")[-2], piece.box.start[0], piece.local_box.start[0]) for piece in qkv.pieces]
    assert found == [("q_proj", 2, 0), ("k_proj", 1, 2), ("v_proj", 1, 3)]


@pytest.mark.parametrize(
    ("layers", "pipeline", "first", "last", "expected"),
    [
        (4, 1, None, None, [4]),
        (4, 2, None, None, [2, 2]),
        (5, 2, None, None, None),
        (5, 2, 2, None, [2, 3]),
        (5, 2, None, 1, [4, 1]),
        (6, 3, 1, 1, [1, 4, 1]),
        (5, 2, 2, 2, None),
        (2, 3, None, None, None),
        (4, 2, 4, None, None),
        (4, 1, 3, None, None),
    ],
)
def test_layers_are_dealt_out_to_the_stages_or_refused(layers, pipeline, first, last, expected):
    sizes = ParallelSizes(world=pipeline, pipeline=pipeline, first_stage_layers=first, last_stage_layers=last)
    stages = sizes.stages(layers)
    assert (stages and [len(stage) for stage in stages]) == expected
    if stages:
        assert [layer for stage in stages for layer in stage] == list(range(layers))


@pytest.mark.parametrize(
    ("layers", "pipeline", "embedding", "loss", "expected"),
    [
        (94, 8, True, True, [11, 12, 12, 12, 12, 12, 12, 11]),
        (3, 2, True, False, [1, 2]),
        (3, 2, False, True, [2, 1]),
        (2, 2, True, True, [1, 1]),
        (5, 1, True, True, [5]),
        (1, 2, True, False, [0, 1]),
        (4, 2, True, False, None),
        (1, 2, False, True, [1, 0]),
        (1, 3, True, True, [0, 1, 0]),
        (1, 4, True, True, None),
    ],
)
def test_embedding_and_loss_take_the_place_of_a_layer_where_they_count(layers, pipeline, embedding, loss, expected):
    sizes = ParallelSizes(world=pipeline, pipeline=pipeline, counts_embedding=embedding, counts_loss=loss)
    stages = sizes.stages(layers)
    assert (stages and [len(stage) for stage in stages]) == expected
    if stages:
        assert [layer for stage in stages for layer in stage] == list(range(layers))
    assert not ParallelSizes(
        world=pipeline, pipeline=pipeline, counts_embedding=True, first_stage_layers=layers // 2
    ).stages(layers)
