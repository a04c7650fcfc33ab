"""Packing, messages and the fetch loop, over memory of this process."""

from __future__ import annotations

import gc
import threading
import time
import weakref
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from verl.checkpoint_engine.errors import TransportError, TransportTimeout
from verl.checkpoint_engine.links.fetch import (
    Bucket,
    FetchLoop,
    bounce_nbytes,
    messages_of,
    run_together,
    spread_over_bounce,
)
from verl.checkpoint_engine.memory.packed import Packing
from verl.checkpoint_engine.plan.layout import Layout
from verl.checkpoint_engine.plan.shards import ShardTable
from verl.checkpoint_engine.plan.sync_plan import SyncPlan, make_plan
from verl.checkpoint_engine.plan.types import Box, Range, Shard, TensorSpec


def plan_of(shapes: Sequence[tuple[int, ...]], *, owners: int, columns: bool, block_nbytes: int) -> SyncPlan:
    """Tensors of uint8, cut into rows or columns, one part per owner as far as they reach."""
    specs = [TensorSpec(name=f"t{index}", shape=shape, dtype="uint8") for index, shape in enumerate(shapes)]
    layout = Layout.of(specs)
    held: list[list[Shard]] = [[] for _ in range(owners)]
    for spec in specs:
        dim = len(spec.shape) - 1 if columns else 0
        bounds = np.linspace(0, spec.shape[dim], owners + 1).astype(int).tolist()
        for owner, (low, high) in enumerate(zip(bounds[:-1], bounds[1:], strict=True)):
            start, stop = [0] * len(spec.shape), list(spec.shape)
            start[dim], stop[dim] = low, high
            if low < high:
                held[owner].append(Shard(spec.name, Box(tuple(start), tuple(stop))))
    return make_plan(layout, [ShardTable.of(layout, shards) for shards in held], block_nbytes=block_nbytes)


plans = st.builds(
    plan_of,
    st.lists(st.lists(st.integers(1, 40), min_size=1, max_size=3).map(tuple), min_size=0, max_size=6),
    owners=st.integers(1, 4),
    columns=st.booleans(),
    block_nbytes=st.sampled_from([64, 512, 4096]),
)


def content(plan: SyncPlan) -> np.ndarray:
    """A slot that is right: no byte of a tensor is zero, every byte of padding is."""
    slot = np.zeros(plan.layout.nbytes, np.uint8)
    for spec, offset in plan.layout:
        slot[offset : offset + spec.nbytes] = np.arange(spec.nbytes) % 255 + 1
    return slot


def pack(plan: SyncPlan, owner: int, slot: np.ndarray) -> np.ndarray:
    """What the owner's region holds when the slot shall become `slot`."""
    packing = Packing.of(plan, owner)
    region = np.zeros(packing.region_nbytes, np.uint8)
    extents = plan.extents.of(plan.pieces_of(owner))
    for (offset, run, rows, stride), position in zip(extents, packing.offset.tolist(), strict=True):
        for row in range(rows):
            begin = offset + row * stride
            region[position + row * run : position + (row + 1) * run] = slot[begin : begin + run]
    return region


@dataclass
class MemoryReader:
    """The reference `RangeReader`. A transfer copies, and is done, when it is asked for the `polls`-th time.

    It waits without taking time: `clock` goes on.
    """

    regions: list[np.ndarray]
    slot: np.ndarray
    bounce: np.ndarray
    polls: int = 1
    stalled: set[int] = field(default_factory=set)
    dead: set[int] = field(default_factory=set)
    in_flight: list[tuple[int, bool]] = field(default_factory=list)
    most_in_flight: int = 0
    most_bounces: int = 0
    started: list[tuple[int, bool]] = field(default_factory=list)
    cancelled: list[int] = field(default_factory=list)
    now_s: float = 0.0

    def clock(self) -> float:
        return self.now_s

    def start(self, owner: int, ranges: Sequence[Range], *, bounce: bool) -> dict:
        self.in_flight.append((owner, bounce))
        self.started.append((ranges[0].src_offset, bounce))
        self.most_in_flight = max(self.most_in_flight, len(self.in_flight))
        self.most_bounces = max(self.most_bounces, sum(bounced for _, bounced in self.in_flight))
        return {"owner": owner, "ranges": ranges, "bounce": bounce, "polls": 0}

    def is_done(self, transfer: dict) -> bool:
        owner = transfer["owner"]
        if owner in self.dead:
            raise TransportError("gone", phase="stage", member=f"trainer-{owner}")
        transfer["polls"] += 1
        if owner in self.stalled or transfer["polls"] < self.polls:
            return False
        target = self.bounce if transfer["bounce"] else self.slot
        for part in transfer["ranges"]:
            piece = self.regions[owner][part.src_offset : part.src_offset + part.nbytes]
            target[part.dst_offset : part.dst_offset + part.nbytes] = piece
        self.in_flight.remove((owner, transfer["bounce"]))
        return True

    def wait(self, timeout_s: float) -> None:
        self.now_s += timeout_s
        time.sleep(0)  # for other loops and their threads

    def cancel(self, transfer: dict) -> None:
        self.cancelled.append(transfer["owner"])
        self.in_flight.remove((transfer["owner"], transfer["bounce"]))


def fetch(
    plan: SyncPlan,
    bucket_nbytes: int = 512,
    places: int | None = None,
    **options: object,
) -> tuple:
    """(loop, reader, buckets) that will fetch `content(plan)`; `options` of the reader and of the loop."""
    expected = content(plan)
    regions = [pack(plan, owner, expected) for owner in range(plan.num_owners)]
    buckets = [bucket for owner in range(plan.num_owners) for bucket in messages_of(plan, owner, bucket_nbytes)]
    if places is not None:
        buckets = spread_over_bounce(buckets, places)
    bounce = np.zeros(bounce_nbytes(buckets), np.uint8)
    of_reader = {name: options.pop(name) for name in ("polls", "stalled", "dead") if name in options}
    reader = MemoryReader(regions, np.zeros_like(expected), bounce, **of_reader)
    arguments = {"version": 7, "timeout_s": 3600.0, "clock": reader.clock} | options
    return FetchLoop(reader=reader, plan=plan, region=reader.slot, bounce=bounce, **arguments), reader, buckets


@given(plans)
@settings(max_examples=60, deadline=None)
def test_a_packed_region_has_a_place_for_every_piece_and_none_overlap(plan: SyncPlan) -> None:
    for owner in range(plan.num_owners):
        packing = Packing.of(plan, owner)
        order = np.argsort(packing.offset)
        ends = packing.offset[order] + packing.nbytes[order]
        assert packing.nbytes.sum() == plan.nbytes_of(owner)
        assert (ends[:-1] <= packing.offset[order][1:]).all()
        assert (ends <= packing.region_nbytes).all()


@given(plan=plans, bucket_nbytes=st.sampled_from([256, 1024, 1 << 20]))
@settings(max_examples=60, deadline=None)
def test_every_byte_is_fetched_once_in_bounded_parts(plan: SyncPlan, bucket_nbytes: int) -> None:
    loop, reader, buckets = fetch(plan, bucket_nbytes=bucket_nbytes)
    largest = int(plan.extents.nbytes.max(initial=0))
    for bucket in buckets:
        assert sum(part.nbytes for part in bucket.ranges) <= max(bucket_nbytes, largest)
        assert not bucket.scatter or len(bucket.ranges) == 1
    moved = loop.run(buckets)
    np.testing.assert_array_equal(reader.slot, content(plan))
    assert moved >= plan.layout.payload_nbytes
    direct = sorted(
        (part.dst_offset, part.nbytes) for bucket in buckets if not bucket.scatter for part in bucket.ranges
    )
    assert all(offset + nbytes <= after for (offset, nbytes), (after, _) in zip(direct[:-1], direct[1:], strict=True))
    scattered = [piece for bucket in buckets for piece in bucket.scatter]
    assert len(scattered) == len(set(scattered))
    bytes_scattered = int(plan.extents.nbytes[scattered].sum()) if scattered else 0
    assert sum(nbytes for _, nbytes in direct) + bytes_scattered == plan.layout.payload_nbytes


def test_pieces_that_touch_at_both_ends_travel_as_one_range() -> None:
    plan = plan_of([(4096, 512)], owners=2, columns=False, block_nbytes=4096)
    (bucket,) = messages_of(plan, 1, 1 << 30)
    assert bucket.ranges == (Range(0, 2048 * 512, 2048 * 512),)


def test_no_more_than_the_given_number_fly_and_one_of_them_through_the_bounce_buffer() -> None:
    plan = plan_of([(1 << 21,), (64, 64), (64, 64)], owners=2, columns=False, block_nbytes=4096)
    loop, reader, buckets = fetch(plan, bucket_nbytes=65536, polls=3, max_in_flight=3)
    assert sum(bool(bucket.scatter) for bucket in buckets) > 1
    loop.run(buckets)
    np.testing.assert_array_equal(reader.slot, content(plan))
    assert (reader.most_in_flight, reader.most_bounces) == (3, 1)


@pytest.mark.parametrize("places", [1, 2, 3])
def test_a_bounce_buffer_with_several_places_takes_as_many_at_a_time(places: int) -> None:
    plan = plan_of([(64, 64)] * 8, owners=2, columns=True, block_nbytes=1024)
    loop, reader, buckets = fetch(plan, bucket_nbytes=4096, places=places, polls=3, interleave=False)
    assert sum(bool(bucket.scatter) for bucket in buckets) == len(buckets) > places
    loop.run(buckets)
    np.testing.assert_array_equal(reader.slot, content(plan))
    assert reader.most_bounces == places


def test_a_deadline_names_the_owners_that_were_waited_for_and_ends_every_transfer() -> None:
    plan = plan_of([(3 << 20,)], owners=3, columns=False, block_nbytes=1 << 20)
    loop, reader, buckets = fetch(plan, stalled={1}, timeout_s=3.0, bucket_nbytes=1 << 20)
    with pytest.raises(TransportTimeout) as raised:
        loop.run(buckets)
    assert "bytes of trainer-1 not here within 3.0 s; done: trainer-0, trainer-2" in str(raised.value)
    assert (raised.value.version, raised.value.phase) == (7, "stage")
    assert reader.cancelled
    assert not reader.in_flight


def test_owners_that_wait_for_the_bounce_buffer_of_a_stalled_one_are_told_apart_from_it() -> None:
    plan = plan_of([(300, 20)], owners=3, columns=False, block_nbytes=512)
    loop, _, buckets = fetch(plan, stalled={0}, timeout_s=3.0)
    with pytest.raises(TransportTimeout) as raised:
        loop.run(buckets)
    message = "bytes of trainer-0 not here within 3.0 s; held up behind them: trainer-1, trainer-2; done: none"
    assert message in str(raised.value)


def test_a_dead_owner_ends_every_transfer() -> None:
    plan = plan_of([(3 << 20,)], owners=3, columns=False, block_nbytes=1 << 20)
    loop, reader, buckets = fetch(plan, stalled={0, 2}, dead={1}, bucket_nbytes=1 << 20)
    with pytest.raises(TransportError, match="gone") as raised:
        loop.run(buckets)
    assert raised.value.member == "trainer-1"
    assert set(reader.cancelled) == {0, 1, 2}
    assert not reader.in_flight


def test_a_loop_that_is_told_to_stop_stops() -> None:
    plan = plan_of([(4096,)], owners=1, columns=False, block_nbytes=512)
    stop = threading.Event()
    loop, reader, buckets = fetch(plan, stalled={0}, clock=time.monotonic, stop=stop)
    threading.Timer(0.05, stop.set).start()
    with pytest.raises(TransportError, match="given up"):
        loop.run(buckets)
    assert not reader.in_flight


def loops_of(loop: FetchLoop, count: int, **options: object) -> list[FetchLoop]:
    """As many that write to the same slot, with `options` of their readers."""
    return [replace(loop, reader=replace(loop.reader, in_flight=[], **options)) for _ in range(count)]


@given(plan=plans, count=st.integers(1, 3))
@settings(max_examples=30, deadline=None)
def test_loops_that_run_together_fetch_every_byte_once(plan: SyncPlan, count: int) -> None:
    loop, reader, buckets = fetch(plan, bucket_nbytes=1024, places=count)
    loops = loops_of(loop, count)
    assert run_together(loops, buckets) == sum(bucket.nbytes for bucket in buckets)
    np.testing.assert_array_equal(reader.slot, content(plan))
    assert all(each.reader.most_bounces <= 1 for each in loops)
    assert len(reader.started) == len(buckets)


def test_loops_that_run_together_never_meet_in_the_bounce_buffer() -> None:
    plan = plan_of([(64, 64)] * 8, owners=2, columns=True, block_nbytes=1024)
    loop, _, buckets = fetch(plan, bucket_nbytes=4096, places=2)
    seen: list[set[int]] = [set(), set()]
    loops = loops_of(loop, 2)
    for each, places in zip(loops, seen, strict=True):
        each.on_bucket = lambda bucket, places=places: places.add(bucket.ranges[0].dst_offset)
    run_together(loops, buckets)
    assert [len(places) for places in seen] == [1, 1]
    assert seen[0] != seen[1]


def test_when_one_loop_fails_the_others_give_up_and_its_error_is_raised() -> None:
    plan = plan_of([(4 << 20,)], owners=2, columns=False, block_nbytes=1 << 20)
    loop, _, buckets = fetch(plan, bucket_nbytes=1 << 20)
    (stalled,), (dying,) = loops_of(loop, 1, stalled={0, 1}), loops_of(loop, 1, dead={0, 1})
    with pytest.raises(TransportError, match="gone"):
        run_together([stalled, dying], buckets)
    assert stalled.reader.in_flight == dying.reader.in_flight == []


def test_a_failure_of_loops_that_run_together_keeps_no_memory_until_a_garbage_collection() -> None:
    plan = plan_of([(4 << 20,)], owners=2, columns=False, block_nbytes=1 << 20)

    def fail() -> weakref.ref[np.ndarray]:
        loop, reader, buckets = fetch(plan, bucket_nbytes=1 << 20)
        with suppress(TransportError):
            run_together(loops_of(loop, 2, dead={0, 1}), buckets)
        return weakref.ref(reader.slot)

    gc.collect()
    gc.disable()
    try:
        assert fail()() is None
    finally:
        gc.enable()


def test_loops_that_run_together_stop_when_they_are_told_to() -> None:
    plan = plan_of([(4 << 20,)], owners=2, columns=False, block_nbytes=1 << 20)
    stop = threading.Event()
    loop, _, buckets = fetch(plan, bucket_nbytes=1 << 20, clock=time.monotonic, stop=stop)
    threading.Timer(0.05, stop.set).start()
    with pytest.raises(TransportError, match="given up"):
        run_together(loops_of(loop, 2, stalled={0, 1}), buckets)


def test_a_deadline_is_for_all_that_a_loop_is_given() -> None:
    plan = plan_of([(2 << 20,)], owners=2, columns=False, block_nbytes=1 << 20)
    loop, reader, (first, second) = fetch(plan, bucket_nbytes=1 << 20, timeout_s=3.0, stalled={1})
    loop.run([first])
    reader.now_s += 3.0
    waits: list[float] = []
    loop.reader.wait = waits.append
    with pytest.raises(TransportTimeout, match=r"bytes of trainer-1 not here within 3\.0 s"):
        loop.run([second])
    assert waits == []  # the time was up


def test_nothing_to_fetch_is_done_at_once() -> None:
    plan = plan_of([], owners=2, columns=False, block_nbytes=512)
    loop, _, buckets = fetch(plan)
    assert buckets == []
    assert loop.run([]) == 0


def test_owners_take_turns() -> None:
    plan = plan_of([(8 << 20,)], owners=2, columns=False, block_nbytes=1 << 20)
    done: list[Bucket] = []
    loop, _, buckets = fetch(plan, bucket_nbytes=1 << 20, max_in_flight=1, on_bucket=done.append)
    loop.run(buckets)
    assert [bucket.owner for bucket in done] == [0, 1] * 4


def test_no_transfer_overtakes_one_that_waits_for_the_bounce_buffer() -> None:
    """Nodes that receive broadcasts in different orders would wait for each other."""
    plan = plan_of([(3 << 20,), (300, 20), (300, 20)], owners=1, columns=False, block_nbytes=4096)
    loop, reader, buckets = fetch(plan, bucket_nbytes=1 << 20, max_in_flight=4)
    *direct, scattered = buckets
    given = [scattered, scattered, *direct]
    loop.run(given)
    assert reader.started == [(bucket.ranges[0].src_offset, bool(bucket.scatter)) for bucket in given]
