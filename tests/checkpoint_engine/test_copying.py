"""Steps: what a wire that copies takes at once, and which pieces are complete then."""

from __future__ import annotations

import pytest

from tests.checkpoint_engine.fakes import ColumnShardedSource
from tests.checkpoint_engine.test_messages import KIB, MIB, MODELS, plan_of
from verl.checkpoint_engine.links.copying import Step, steps_of
from verl.checkpoint_engine.links.fetch import messages_of
from verl.checkpoint_engine.memory.digest import CACHED_NBYTES
from verl.checkpoint_engine.plan.sync_plan import SyncPlan


def steps_in(plan: SyncPlan, bucket_nbytes: int) -> list[Step]:
    """After a check that the steps of each bucket are the bucket, in order."""
    buckets = [bucket for owner in range(plan.num_owners) for bucket in messages_of(plan, owner, bucket_nbytes)]
    steps, straight = steps_of(plan, buckets), [bucket for bucket in buckets if not bucket.scatter]
    assert len(steps) == len(straight)
    for bucket in straight:
        (message,) = bucket.ranges
        offset = 0
        for step in steps[bucket.owner, message.src_offset]:
            place = (step.src_offset - message.src_offset, step.dst_offset - message.dst_offset)
            assert place == (offset, offset)
            offset += step.nbytes
        assert offset == message.nbytes
    return [step for parts in steps.values() for step in parts]


@pytest.mark.parametrize("trainers", [1, 3])
@pytest.mark.parametrize("bucket_nbytes", [64 * KIB, MIB + 1, 64 * MIB])
@pytest.mark.parametrize("shapes", MODELS.values(), ids=MODELS)
def test_every_piece_that_goes_straight_is_complete_in_one_step(shapes, bucket_nbytes: int, trainers: int):
    plan = plan_of(shapes, trainers)
    steps = steps_in(plan, bucket_nbytes)
    assert all(step.nbytes <= CACHED_NBYTES for step in steps)
    places = {piece: (offset, nbytes) for step in steps for piece, offset, nbytes in step.pieces}
    assert sum(len(step.pieces) for step in steps) == len(places)
    extents = plan.extents
    assert all(place == (extents.offset[piece], extents.nbytes[piece]) for piece, place in places.items())
    assert sum(nbytes for _, nbytes in places.values()) == sum(step.nbytes for step in steps)
    for step in steps:
        for _, offset, nbytes in step.pieces:
            assert step.dst_offset <= offset
            assert offset + nbytes <= step.dst_offset + step.nbytes


def test_a_piece_that_is_larger_than_the_cache_is_a_step_by_itself():
    plan = plan_of({"w": (5 * MIB,)}, block_nbytes=2 * MIB)
    assert [(step.nbytes, len(step.pieces)) for step in steps_in(plan, 64 * MIB)] == [
        (2 * MIB, 1),
        (2 * MIB, 1),
        (MIB, 1),
    ]


def test_a_piece_that_is_larger_than_a_bucket_is_complete_in_no_step():
    plan = plan_of({"w": (5 * MIB,)}, block_nbytes=2 * MIB)
    steps = steps_in(plan, 3 * MIB // 2)
    assert [nbytes for step in steps for _, _, nbytes in step.pieces] == [MIB]


def test_strided_pieces_have_no_steps():
    assert steps_in(plan_of({"w": (64, 40_000)}, 2, source=ColumnShardedSource), 8 * MIB) == []
