"""How the pieces of an owner are packed, and cut into messages of one range each."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tests.checkpoint_engine.fakes import ColumnShardedSource, RowShardedSource
from verl.checkpoint_engine.links.fetch import Bucket, FetchLoop, messages_of
from verl.checkpoint_engine.memory.packed import SHORT_NBYTES, Packing
from verl.checkpoint_engine.plan.layout import ALIGNMENT, Layout
from verl.checkpoint_engine.plan.shards import ShardTable
from verl.checkpoint_engine.plan.sync_plan import SyncPlan, make_plan

KIB = 1024
MIB = 1024 * KIB


def plan_of(
    shapes: dict[str, tuple[int, ...]], trainers: int = 1, *, block_nbytes: int = 64 * KIB, source=RowShardedSource
) -> SyncPlan:
    tensors = {name: torch.empty(shape, dtype=torch.uint8) for name, shape in shapes.items()}
    sources = [source(tensors, rank, trainers) for rank in range(trainers)]
    layout = Layout.of(sources[0].specs())
    return make_plan(layout, [ShardTable.of(layout, held.shards()) for held in sources], block_nbytes=block_nbytes)


class Memory:
    """Regions of owners in which every byte is known; 'reads' are copies that are done at once, or when told."""

    def __init__(self, plan: SyncPlan) -> None:
        rng = np.random.default_rng(0)
        self.slot = np.zeros(plan.layout.nbytes, np.uint8)
        self.bounce = np.zeros(plan.layout.nbytes, np.uint8)
        self.regions = {
            owner: rng.integers(1, 255, Packing.of(plan, owner).region_nbytes, np.uint8)
            for owner in range(plan.num_owners)
        }

    def start(self, owner, ranges, *, bounce):
        target = self.bounce if bounce else self.slot
        for part in ranges:
            source = self.regions[owner][part.src_offset : part.src_offset + part.nbytes]
            target[part.dst_offset : part.dst_offset + part.nbytes] = source

    def is_done(self, transfer):
        return True

    def wait(self, timeout_s):
        pass

    def cancel(self, transfer):
        pass


def fetched(plan: SyncPlan, memory: Memory, buckets: list[Bucket]) -> int:
    return FetchLoop(memory, plan, memory.slot, memory.bounce, version=1, timeout_s=60).run(buckets)


def assert_every_piece_is_in_its_place(plan: SyncPlan, memory: Memory) -> None:
    for owner in range(plan.num_owners):
        packing = Packing.of(plan, owner)
        for row, (offset, run, rows, stride) in enumerate(plan.extents.of(plan.pieces_of(owner))):
            got = np.concatenate([memory.slot[offset + i * stride :][:run] for i in range(rows)])
            sent = memory.regions[owner][packing.offset[row] :][: packing.nbytes[row]]
            assert np.array_equal(got, sent), plan.describe(packing.first + row)


MODELS = {
    "one large": {"w": (40, 100_000)},
    "many tiny": {f"t{i}": (3,) for i in range(500)},
    "large and small in turn": {f"{kind}{i}": (size,) for i in range(5) for kind, size in (("w", 2 * MIB), ("n", 900))},
    "just short": {"w": (SHORT_NBYTES - 1,), "v": (SHORT_NBYTES,)},
    "nothing": {},
}


@pytest.mark.parametrize("source", [RowShardedSource, ColumnShardedSource])
@pytest.mark.parametrize("trainers", [1, 3])
@pytest.mark.parametrize("bucket_nbytes", [64 * KIB, MIB + 1, 64 * MIB])
@pytest.mark.parametrize("shapes", MODELS.values(), ids=MODELS)
def test_every_byte_lands_where_it_belongs(shapes, bucket_nbytes, trainers, source):
    plan = plan_of(shapes, trainers, source=source)
    memory = Memory(plan)
    buckets = [bucket for owner in range(trainers) for bucket in messages_of(plan, owner, bucket_nbytes)]
    fetched(plan, memory, buckets)
    assert_every_piece_is_in_its_place(plan, memory)


@pytest.mark.parametrize("bucket_nbytes", [64 * KIB, MIB + 1, 64 * MIB])
@pytest.mark.parametrize("shapes", MODELS.values(), ids=MODELS)
def test_messages_are_one_range_of_at_most_a_bucket_and_count_weights_alone(shapes, bucket_nbytes):
    plan = plan_of(shapes, 2)
    for owner in range(2):
        messages = messages_of(plan, owner, bucket_nbytes)
        assert all(len(message.ranges) == 1 and message.ranges[0].nbytes <= bucket_nbytes for message in messages)
        assert sum(message.nbytes for message in messages) == plan.nbytes_of(owner)


def test_thousands_of_tiny_tensors_are_one_message():
    assert len(messages_of(plan_of({f"t{i}": (7,) for i in range(5000)}), 0, 2 * MIB)) == 1


def test_small_tensors_between_large_ones_travel_together():
    plan = plan_of({f"{kind}{i}": (size,) for i in range(5) for kind, size in (("w", MIB + 1), ("n", 900))})
    scattered = [bool(message.scatter) for message in messages_of(plan, 0, 64 * MIB)]
    assert scattered == [False] * 5 + [True]


@pytest.mark.parametrize(
    ("bucket_nbytes", "lengths"),
    [
        (64 * MIB, [3 * MIB]),
        (2 * MIB, [2 * MIB, MIB]),
        (2 * MIB - 1, [2 * MIB - 64 * KIB, MIB + 64 * KIB]),
        (48 * KIB, [48 * KIB, 16 * KIB] * 48),
    ],
    ids=["whole", "at the bucket", "between pieces", "inside pieces that are larger than a bucket"],
)
def test_a_run_that_spans_tensors_is_cut_between_pieces_where_they_fit(bucket_nbytes: int, lengths: list[int]):
    plan = plan_of({"a": (MIB,), "b": (MIB,), "c": (MIB,)})
    assert [message.ranges[0].nbytes for message in messages_of(plan, 0, bucket_nbytes)] == lengths


def test_packed_pieces_do_not_overlap_and_runs_are_aligned():
    plan = plan_of(MODELS["large and small in turn"] | {"odd": (13, 77)}, 3, source=ColumnShardedSource)
    for owner in range(3):
        packing = Packing.of(plan, owner)
        order = np.argsort(packing.offset)
        ends = packing.offset[order] + packing.nbytes[order]
        assert (packing.offset[order][1:] >= ends[:-1]).all()
        assert ends[-1] <= packing.region_nbytes
        starts_run = np.concatenate([[True], packing.offset[order][1:] > ends[:-1]])
        assert (packing.offset[order][starts_run] % ALIGNMENT == 0).all()
