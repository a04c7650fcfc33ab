"""How nodes share a version out among themselves, over plans of every kind."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.checkpoint_engine.test_fetching import plan_of, plans
from tests.checkpoint_engine.test_one_sided import MemoryWire
from verl.checkpoint_engine.links.cuts import UPSTREAM, InTurn, parts_of, shares_of
from verl.checkpoint_engine.links.fetch import Bucket, messages_of
from verl.checkpoint_engine.links.holder import NodeHolder
from verl.checkpoint_engine.links.upstream import Page
from verl.checkpoint_engine.plan.sync_plan import SyncPlan
from verl.checkpoint_engine.plan.topology import chain
from verl.checkpoint_engine.plan.types import Member, Range


@given(plan=plans, receivers=st.integers(1, 5))
@settings(max_examples=60, deadline=None)
def test_every_piece_is_in_the_share_of_one_receiver(plan: SyncPlan, receivers: int):
    shares = shares_of(plan, receivers)
    assert len(shares) == receivers
    ends = [share.dst_offset + share.nbytes for share in shares]
    assert [share.dst_offset for share in shares] == [0, *ends[:-1]]
    assert ends[-1] == plan.layout.nbytes
    for begin, end in zip(plan.extents.offset.tolist(), plan.extents.end.tolist(), strict=True):
        assert sum(share.dst_offset <= begin and end <= stop for share, stop in zip(shares, ends, strict=True)) == 1


@given(plan=plans, receivers=st.integers(1, 5), bucket_nbytes=st.sampled_from([64, 500, 4096]))
@settings(max_examples=60, deadline=None)
def test_receivers_read_every_byte_of_every_owner_once(plan: SyncPlan, receivers: int, bucket_nbytes: int):
    for owner in range(plan.num_owners):
        of_all = [
            bucket for share in shares_of(plan, receivers) for bucket in messages_of(plan, owner, bucket_nbytes, share)
        ]
        assert sum(bucket.nbytes for bucket in of_all) == plan.nbytes_of(owner)
        spans = sorted((bucket.ranges[0].src_offset, bucket.ranges[0].nbytes) for bucket in of_all)
        assert all(start + nbytes <= after for (start, nbytes), (after, _) in zip(spans, spans[1:], strict=False))


def test_shares_are_about_equally_long():
    plan = plan_of([(40, 40)] * 6, owners=2, columns=False, block_nbytes=64)
    sizes = [share.nbytes for share in shares_of(plan, 3)]
    assert max(sizes) - min(sizes) <= 2 * 64 + 64


def test_parts_cover_shares_and_never_two_of_them():
    shares = [Range(0, 0, 250), Range(250, 250, 0), Range(250, 250, 100)]
    spans = [part.ranges[0] for part in parts_of(shares, 100)]
    assert [(span.dst_offset, span.nbytes) for span in spans] == [(0, 100), (100, 100), (200, 50), (250, 100)]


def test_parts_are_taken_as_they_are_there_beside_buckets_in_their_order():
    own = [Bucket(0, (Range(start, start, 10),), 10) for start in (0, 10, 20)]
    parts = [Bucket(UPSTREAM, (Range(start, start, 10),), 10) for start in (30, 40, 50)]
    there, flying, begun = np.zeros(3, np.uint8), [], []
    waiting = InTurn(2, own, parts, [0, 1, 2], lambda: there)

    def start_all() -> list[Bucket]:
        begun.clear()
        while (bucket := waiting.next(flying)) is not None:
            waiting.remove(bucket)
            flying.append(bucket)
            begun.append(bucket)
        return begun

    assert start_all() == own[:2]
    there[2] = 1
    assert start_all() == [parts[2]]
    flying.remove(own[0])
    there[:] = 1
    assert start_all() == [own[2], parts[0]]
    assert (list(waiting), len(waiting)) == ([parts[1]], 1)
    flying.clear()
    assert start_all() == [parts[1]]
    assert not len(waiting)


def test_a_node_that_goes_on_says_no_longer_that_it_waits():
    plan = plan_of([(40, 40)] * 2, owners=1, columns=False, block_nbytes=64)
    members = [Member(role=role, index=index, host="a") for role, index in (("trainer", 0), ("node", 0), ("node", 1))]
    holder = NodeHolder(plan, MemoryWire(), 256)
    buckets = holder.join(chain(members[:1], members[1:]), members[1], 256)
    holder._offer(7, np.zeros(plan.layout.nbytes, np.uint8), buckets)
    holder._say_who_is_awaited(1)
    assert holder._page.awaited[0] == 1
    holder._arrived(buckets[0])
    assert holder._page.awaited[0] == Page.EMPTY
