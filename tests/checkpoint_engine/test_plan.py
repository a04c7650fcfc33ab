"""The plan, against random models and random shardings: every byte once, where numpy's indexing says it is."""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from verl.checkpoint_engine.errors import PlanError
from verl.checkpoint_engine.plan.layout import MAX_DIMS, Layout
from verl.checkpoint_engine.plan.shards import ShardTable, flat_range_boxes
from verl.checkpoint_engine.plan.sync_plan import SyncPlan, make_plan
from verl.checkpoint_engine.plan.types import ITEMSIZE, Box, Shard, TensorSpec

EXAMPLES = settings(deadline=None, max_examples=60)
Model = tuple[list[TensorSpec], list[list[Shard]]]


@st.composite
def cuts(draw: st.DrawFn, size: int, parts: int) -> list[int]:
    """`parts + 1` ascending bounds of `0..size`; neighbours may be equal, so a part may be empty."""
    inner = draw(st.lists(st.integers(0, size), min_size=parts - 1, max_size=parts - 1))
    return [0, *sorted(inner), size]


@st.composite
def sharded(draw: st.DrawFn, shape: tuple[int, ...], ranks: int) -> list[list[Box]]:
    """The boxes that each rank holds: replicated, along one dimension, a 2-D grid, or flat ranges."""
    kinds = ["replicated", "flat"]
    kinds += [f"along {dim}" for dim in range(len(shape))]
    if len(shape) >= 2 and ranks % 2 == 0:
        kinds.append("grid")
    kind = draw(st.sampled_from(kinds))
    if kind == "replicated":
        return [[Box.whole(shape)]] * ranks
    if kind == "flat":
        bounds = draw(cuts(prod(shape), ranks))
        return [flat_range_boxes(shape, low, high) for low, high in zip(bounds, bounds[1:], strict=False)]
    if kind == "grid":
        dims = sorted(draw(st.permutations(range(len(shape))))[:2])
        bounds = {dims[0]: draw(cuts(shape[dims[0]], 2)), dims[1]: draw(cuts(shape[dims[1]], ranks // 2))}
        places = [{dims[0]: row, dims[1]: column} for row in range(2) for column in range(ranks // 2)]
    else:
        dim = int(kind.split()[1])
        bounds = {dim: draw(cuts(shape[dim], ranks))}
        places = [{dim: rank} for rank in range(ranks)]
    whole = Box.whole(shape)
    boxes = []
    for place in places:
        start, stop = list(whole.start), list(whole.stop)
        for dim, nth in place.items():
            start[dim], stop[dim] = bounds[dim][nth], bounds[dim][nth + 1]
        boxes.append([Box(tuple(start), tuple(stop))])
    return boxes


@st.composite
def models(draw: st.DrawFn) -> Model:
    ranks = draw(st.integers(1, 4))
    shapes = draw(st.lists(st.lists(st.integers(0, 9), max_size=4).map(tuple), max_size=5))
    dtypes = st.sampled_from(["bfloat16", "float32", "int8"])
    specs = [TensorSpec(name=f"t{i}", shape=shape, dtype=draw(dtypes)) for i, shape in enumerate(shapes)]
    held: list[list[Shard]] = [[] for _ in range(ranks)]
    for spec in specs:
        for rank, boxes in enumerate(draw(sharded(spec.shape, ranks))):
            held[rank] += [Shard(spec.name, box) for box in boxes]
    return specs, held


def plan_for(specs: list[TensorSpec], held: list[list[Shard]], block_nbytes: int) -> SyncPlan:
    layout = Layout.of(specs)
    return make_plan(layout, [ShardTable.of(layout, shards) for shards in held], block_nbytes=block_nbytes)


def indices_of_piece(plan: SyncPlan, piece: int) -> np.ndarray:
    """Offsets in the region of every byte of the piece, from its extents."""
    extents = plan.extents
    rows = int(extents.offset[piece]) + np.arange(extents.rows[piece])[:, None] * extents.stride[piece]
    return (rows + np.arange(extents.run_nbytes[piece])[None]).reshape(-1)


def indices_of_box(plan: SyncPlan, piece: int) -> np.ndarray:
    """The same from the piece's box, by numpy's own indexing."""
    tensor = int(plan.boxes.tensor[piece])
    spec = plan.layout.specs[tensor]
    box = plan.boxes.box(piece, len(spec.shape))
    elements = np.arange(spec.numel).reshape(spec.shape)[tuple(map(slice, box.start, box.stop))].reshape(-1, 1)
    itemsize = ITEMSIZE[spec.dtype]
    return (plan.layout.offsets[tensor] + elements * itemsize + np.arange(itemsize)[None]).reshape(-1)


@EXAMPLES
@given(models(), st.sampled_from([1, 8, 24, 100, 10_000]))
def test_pieces_cover_every_byte_of_every_tensor_exactly_once(model: Model, block_nbytes: int):
    plan = plan_for(*model, block_nbytes)
    hits = np.zeros(plan.layout.nbytes, np.int64)
    for piece in range(len(plan)):
        np.add.at(hits, indices_of_piece(plan, piece), 1)
    expected = np.zeros_like(hits)
    for spec, offset in plan.layout:
        expected[offset : offset + spec.nbytes] = 1
    assert (hits == expected).all()


@EXAMPLES
@given(models(), st.sampled_from([1, 8, 24, 100, 10_000]))
def test_a_piece_lies_where_its_box_is_and_is_at_most_a_block_long(model: Model, block_nbytes: int):
    plan = plan_for(*model, block_nbytes)
    for piece in range(len(plan)):
        assert indices_of_piece(plan, piece).tolist() == indices_of_box(plan, piece).tolist()
        itemsize = ITEMSIZE[plan.layout.specs[int(plan.boxes.tensor[piece])].dtype]
        assert int(plan.extents.nbytes[piece]) <= max(block_nbytes, itemsize)


@pytest.mark.parametrize("dims", [(1, 2), (1, 3), (2, 3), (0, 2)])
@pytest.mark.parametrize("block_nbytes", [24, 10_000])
def test_boxes_that_are_partial_in_two_inner_dimensions_are_cut_until_evenly_strided(
    dims: tuple[int, int], block_nbytes: int
):
    shape = (3, 4, 6, 2)
    start, stop = [0] * 4, list(shape)
    held: list[list[Shard]] = []
    for halves in ((0, 0), (0, 1), (1, 0), (1, 1)):
        for dim, half in zip(dims, halves, strict=True):
            start[dim], stop[dim] = half * (shape[dim] // 2), shape[dim] if half else shape[dim] // 2
        held.append([Shard("t", Box(tuple(start), tuple(stop)))])
    plan = plan_for([TensorSpec(name="t", shape=shape, dtype="float32")], held, block_nbytes)
    for piece in range(len(plan)):
        assert indices_of_piece(plan, piece).tolist() == indices_of_box(plan, piece).tolist()


@EXAMPLES
@given(models(), st.sampled_from([8, 100]))
def test_a_piece_is_sent_by_a_rank_that_holds_it(model: Model, block_nbytes: int):
    plan = plan_for(*model, block_nbytes)
    held = model[1]
    for piece in range(len(plan)):
        spec = plan.layout.specs[int(plan.boxes.tensor[piece])]
        box = plan.boxes.box(piece, len(spec.shape))
        assert any(
            shard.name == spec.name
            and all(low <= start for low, start in zip(shard.box.start, box.start, strict=True))
            and all(stop <= high for stop, high in zip(box.stop, shard.box.stop, strict=True))
            for shard in held[plan.owner_of(piece)]
        )
        assert piece in plan.pieces_of(plan.owner_of(piece))


@EXAMPLES
@given(models())
def test_encoding_keeps_everything(model: Model):
    plan = plan_for(*model, 24)
    again = SyncPlan.decode(plan.encode())
    assert again.layout == plan.layout
    assert again.num_owners == plan.num_owners
    for mine, theirs in (
        (plan.boxes.tensor, again.boxes.tensor),
        (plan.first, again.first),
        (plan.boxes.start, again.boxes.start),
        (plan.boxes.stop, again.boxes.stop),
        (plan.extents.offset, again.extents.offset),
        (plan.extents.stride, again.extents.stride),
    ):
        assert mine.tolist() == theirs.tolist()


@EXAMPLES
@given(
    st.lists(st.lists(st.integers(1, 40), min_size=1, max_size=2).map(tuple), min_size=1, max_size=6),
    st.integers(1, 5),
    st.sampled_from([16, 64, 256]),
)
def test_what_all_ranks_hold_is_spread_evenly_over_them(shapes: list[tuple[int, ...]], ranks: int, block_nbytes: int):
    specs = [TensorSpec(name=f"t{i}", shape=shape, dtype="float32") for i, shape in enumerate(shapes)]
    plan = plan_for(specs, [[Shard(spec.name, Box.whole(spec.shape)) for spec in specs]] * ranks, block_nbytes)
    sent = [plan.nbytes_of(rank) for rank in range(ranks)]
    assert max(sent) - min(sent) <= block_nbytes
    assert sum(sent) == plan.layout.payload_nbytes


def test_ranks_with_little_of_their_own_send_more_of_what_all_hold():
    specs = [TensorSpec(name="own", shape=(64,), dtype="int8"), TensorSpec(name="shared", shape=(64,), dtype="int8")]
    shared = Shard("shared", Box.whole((64,)))
    plan = plan_for(specs, [[Shard("own", Box.whole((64,))), shared], [shared]], 8)
    assert [plan.nbytes_of(0), plan.nbytes_of(1)] == [64, 64]


@EXAMPLES
@given(st.lists(st.integers(0, 7), max_size=4).map(tuple), st.data())
def test_a_flat_range_is_few_disjoint_boxes_in_order(shape: tuple[int, ...], data: st.DataObject):
    start, stop = sorted(data.draw(st.tuples(st.integers(0, prod(shape)), st.integers(0, prod(shape)))))
    flat = np.arange(prod(shape)).reshape(shape)
    boxes = flat_range_boxes(shape, start, stop)
    found = [flat[tuple(map(slice, box.start, box.stop))].reshape(-1).tolist() for box in boxes]
    assert sum(found, []) == list(range(start, stop))
    assert len(boxes) <= max(1, 2 * len(shape))


SPECS = [TensorSpec(name=name, shape=(4, 4), dtype="float32") for name in ("a", "b", "c")]


def rows(name: str, start: int, stop: int) -> Shard:
    return Shard(name, Box((start, 0), (stop, 4)))


def columns(name: str, start: int, stop: int) -> Shard:
    return Shard(name, Box((0, start), (4, stop)))


@pytest.mark.parametrize(
    "alter",
    [
        lambda first, columns: ([], columns),
        lambda first, columns: ([1, *first[1:]], columns),
        lambda first, columns: ([*first[:-1], first[-1] - 1], columns),
        lambda first, columns: ([*first[:-1], first[-1] + 1], columns),
        lambda first, columns: ([0, first[-1], *first[1:]], columns),
        lambda first, columns: (first, columns[:-1]),
        lambda first, columns: (first, [(columns[0][0], MAX_DIMS + 1), *columns[1:2] * (2 * MAX_DIMS + 3)]),
        lambda first, columns: (first, [(-1, columns[0][1]), *columns[1:]]),
    ],
)
def test_what_cannot_be_a_plan_is_not_decoded(alter: Callable[..., tuple[list[int], list[Any]]]):
    plan = plan_for(SPECS, [[rows("a", 0, 4), rows("b", 0, 2)], [rows("b", 2, 4), rows("c", 0, 4)]], 1024)
    layout, *rest = msgspec.msgpack.decode(plan.encode())
    with pytest.raises(PlanError, match="not an encoded plan"):
        SyncPlan.decode(msgspec.msgpack.encode([layout, *alter(*rest)]))


def test_one_error_names_every_tensor_that_is_not_covered_and_how_much_is_missing():
    with pytest.raises(PlanError) as raised:
        plan_for(SPECS, [[rows("a", 0, 4), rows("b", 0, 2)], [rows("b", 3, 4)]], 1024)
    message = str(raised.value)
    assert "2 tensors are not covered" in message
    assert "b: 4 of 16 elements held by nobody" in message
    assert "c: 16 of 16 elements held by nobody" in message
    assert "a:" not in message


@pytest.mark.parametrize(
    "held",
    [
        [[rows("a", 0, 3)], [rows("a", 2, 4)]],
        [[columns("a", 0, 3)], [columns("a", 2, 4)]],
        [[rows("a", 0, 4)], [columns("a", 0, 2)]],
        [[rows("a", 0, 3), rows("a", 1, 2)]],  # as many elements as the tensor has, one row twice and one never
        [[columns("a", 0, 2), columns("a", 1, 3)]],
    ],
    ids=["rows", "columns", "whole and part", "rows, right total", "columns, right total"],
)
def test_parts_that_overlap_are_refused_by_name(held: list[list[Shard]]):
    rest = [rows("b", 0, 4), rows("c", 0, 2), rows("c", 1, 4)]
    with pytest.raises(PlanError) as raised:
        plan_for(SPECS, [held[0] + rest, *held[1:]], 1024)
    message = str(raised.value)
    assert "a: held in boxes that overlap" in message
    assert "c: held in boxes that overlap" in message
    assert "b:" not in message


def test_one_error_lists_every_shard_that_is_unknown_or_out_of_bounds():
    layout = Layout.of(SPECS)
    shards = [rows("a", 0, 4), rows("stranger", 0, 1), rows("b", 0, 5), Shard("c", Box((0,), (4,)))]
    with pytest.raises(PlanError) as raised:
        ShardTable.of(layout, shards)
    message = str(raised.value)
    assert "3 shards do not fit" in message
    assert "stranger: held by a trainer rank but not among the specs" in message
    assert "b: " in message
    assert "c: " in message
    assert "a: " not in message


def test_a_very_long_list_of_problems_is_cut_and_counted():
    specs = [TensorSpec(name=f"t{i}", shape=(1,), dtype="int8") for i in range(60)]
    with pytest.raises(PlanError, match=r"60 tensors.*; and 10 more"):
        plan_for(specs, [[]], 8)


def test_a_piece_is_described_by_tensor_box_bytes_and_owner():
    plan = plan_for(SPECS, [[rows(name, 0, 2) for name in "abc"], [rows(name, 2, 4) for name in "abc"]], 1024)
    described = [plan.describe(piece) for piece in range(len(plan))]
    assert described[0] == "a[0:2, 0:4] (bytes 0..32, from trainer-0)"
    assert described[-1] == "c[2:4, 0:4] (bytes 544..576, from trainer-1)"
