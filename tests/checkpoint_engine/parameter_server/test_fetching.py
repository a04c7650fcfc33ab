"""A rank's thread fetches ahead; the engine is one that has loaded whatever it is offered."""

from __future__ import annotations

import gc
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.checkpoint_engine.fakes import soon
from verl.checkpoint_engine.errors import BackendUnavailable, TransportError
from verl.checkpoint_engine.links.rendezvous import Deadline
from verl.checkpoint_engine.links.wire import Wire
from verl.checkpoint_engine.parameter_server.buckets import Bucket
from verl.checkpoint_engine.parameter_server.fetching import Fetcher, LinkBuffers, Sources
from verl.checkpoint_engine.parameter_server.peers import PeerReader
from verl.checkpoint_engine.parameter_server.progress import Events, FirstFailure
from verl.checkpoint_engine.parameter_server.rank_device import Device
from verl.checkpoint_engine.parameter_server.records import RankMetas

NBYTES = 64
BUCKETS = [
    (number, Bucket(owner=0, buffer=0, offset=number * NBYTES, address=0, nbytes=NBYTES, tensors=()))
    for number in range(4)
]


class Link:
    """Halves that are free at once."""

    def __init__(self) -> None:
        self.halves = [torch.zeros(NBYTES, dtype=torch.uint8) for _ in range(3)]

    def half(self, index: int) -> torch.Tensor:
        return self.halves[index]

    def is_free(self, index: int) -> bool:
        return True

    def await_free(self, index: int, timeout_s: float) -> None:
        pass


class Numbered:
    """A rank's own buffer: bucket n is full of n."""

    memory = torch.arange(len(BUCKETS), dtype=torch.uint8).repeat_interleave(NBYTES)


def no_wire() -> Wire:
    raise BackendUnavailable("the P2P store needs Mooncake")


@pytest.fixture
def sources(monkeypatch: pytest.MonkeyPatch) -> Sources:
    own: Any = [Numbered()]
    monkeypatch.setattr(Sources, "is_own", lambda _self, _owner: True)
    return Sources(
        device=Device.of(0, 1, None),
        metas={},
        own=own,
        own_incarnation=1,
        reader=PeerReader(no_wire),
        deadline=Deadline(60.0),
        stop=threading.Event(),
    )


def test_the_next_bucket_is_fetched_while_one_is_broadcast_also_if_both_are_of_the_same_rank(sources: Sources):
    events, link = Events(0), Link()
    failure = FirstFailure()
    halves = LinkBuffers(link, 3, Deadline(20.0), failure)  # type: ignore[arg-type]
    with Fetcher(sources, halves, BUCKETS, ahead=True, events=events, failure=failure) as fetcher:
        fetcher.start()
        for number, bucket in BUCKETS:
            half = fetcher.take(number, bucket)
            # Nothing has been offered to the engine: this bucket is being broadcast.
            following = ("fetch-end", min(number + 1, len(BUCKETS) - 1))
            assert soon(lambda following=following: following in {(e.kind, e.bucket) for e in events.in_order()})
            assert halves.memory(half, NBYTES).unique().tolist() == [number]
            halves.offered(half)


def test_while_all_halves_are_on_their_way_who_fetches_waits_for_one_and_who_broadcasts_gets_none():
    halves = LinkBuffers(Link(), 2, Deadline(20.0), FirstFailure())  # type: ignore[arg-type]
    assert [halves.try_take(), halves.try_take()] == [0, 1]
    assert halves.try_take() is None
    with ThreadPoolExecutor(1) as pool:
        taken = pool.submit(halves.take)
        with pytest.raises(TimeoutError):
            taken.result(timeout=0.1)
        halves.offered(1)
        assert taken.result(timeout=60) == 1


def test_who_broadcasts_leaves_the_half_that_is_reserved_for_who_fetches():
    halves = LinkBuffers(Link(), 3, Deadline(20.0), FirstFailure())  # type: ignore[arg-type]
    halves.reserve()
    assert [halves.try_take(), halves.try_take(), halves.try_take()] == [1, 2, None]
    assert halves.take_reserved() == 0
    halves.offered(2)
    assert halves.try_take() == 2


def test_waiting_for_a_half_ends_with_the_first_failure():
    failure = FirstFailure()
    halves = LinkBuffers(Link(), 1, Deadline(20.0), failure)  # type: ignore[arg-type]
    halves.take()
    failure.set(TransportError("rank 3 has died"))
    with pytest.raises(TransportError, match="rank 3 has died"):
        halves.take()


def test_a_thread_that_fails_when_all_is_over_leaves_nothing_of_it_in_memory():
    """As the request to the engines does, when another rank's failure was told first."""
    failure, memory = FirstFailure(), torch.zeros(1)
    alive = weakref.ref(memory)

    def request(_: torch.Tensor) -> None:
        raise TransportError("the ParameterServer gave up")

    def fails(memory: torch.Tensor, failure: FirstFailure) -> None:
        try:
            request(memory)
        except TransportError as exc:
            failure.set(exc)

    failure.set(TransportError("rank 3 has died"))
    failure.forget()
    gc.disable()
    try:
        fails(memory, failure)
        del memory, failure
        assert alive() is None
    finally:
        gc.enable()


def test_who_has_no_p2p_store_is_named(sources: Sources, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(Sources, "is_own", lambda _self, _owner: False)
    owner = RankMetas(rank=0, host="far", device_id="cpu-0", rdma_device="cpu-0", p2p_address="", buffers=())
    read = replace(sources, metas={0: owner})
    halves = LinkBuffers(Link(), 3, Deadline(20.0), FirstFailure())  # type: ignore[arg-type]
    fetcher = Fetcher(read, halves, BUCKETS, ahead=True, events=Events(0), failure=FirstFailure())
    with pytest.raises(TransportError, match="bytes of rank 0 can only be read .* but this rank has no P2P store"):
        fetcher.__enter__()
    with pytest.raises(TransportError, match="bytes of rank 0 can only be read .* but rank 0 has no P2P store"):
        fetcher.start()
