"""Broadcasts along a chain: everybody gets the same bytes, in order, and everybody sends them once."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch.distributed import HashStore

from verl.checkpoint_engine.config import GlooOptions
from verl.checkpoint_engine.links.gloo_chain import SEGMENT_NBYTES, Chain, GlooChain
from verl.checkpoint_engine.plan.topology import Lane

TIMEOUT_S = 120.0
SIZES = (1, SEGMENT_NBYTES, 2 * SEGMENT_NBYTES + 5, 33)


@pytest.mark.parametrize("lane", [Lane(device=None, threads=2), Lane(device=3, threads=1)], ids=["own", "shared"])
@pytest.mark.parametrize("members", [2, 3, 5])
def test_every_member_gets_what_rank_0_sends_whatever_the_sizes(members: int, lane: Lane):
    store = HashStore()
    sent = [torch.randint(256, (size,), dtype=torch.uint8) for size in SIZES]

    def take_part(rank: int) -> list[torch.Tensor]:
        communicator = GlooChain(GlooOptions(interface="lo"))
        group = communicator.group(store, rank, members, lane, TIMEOUT_S)
        memories = sent if rank == 0 else [torch.zeros_like(memory) for memory in sent]
        flying = [communicator.broadcast(group, memory, sending=rank == 0) for memory in memories]
        deadline = time.monotonic() + TIMEOUT_S
        while flying:
            assert time.monotonic() < deadline
            flying = [flight for flight in flying if not flight.is_done()]
        communicator.leave(group)
        return memories

    with ThreadPoolExecutor(members) as pool:
        for memories in pool.map(take_part, range(members)):
            assert all(map(torch.equal, memories, sent))


class Work:
    ended = False
    error: RuntimeError | None = None

    def is_completed(self) -> bool:
        return self.ended

    def wait(self) -> None:
        if self.error:
            raise self.error


class Pair:
    def __init__(self) -> None:
        self.posted: list[torch.Tensor] = []
        self.works: list[Work] = []

    def broadcast(self, tensors: list[torch.Tensor], options: Any) -> Work:
        self.posted += tensors
        self.works.append(Work())
        return self.works[-1]


def test_what_has_arrived_first_is_passed_on_in_the_order_that_the_next_member_expects():
    before, after = Pair(), Pair()
    chain = Chain(before, after, segment_nbytes=4)
    flights = [chain.broadcast(torch.zeros(nbytes, dtype=torch.uint8)) for nbytes in (6, 3)]
    assert [len(memory) for memory in before.posted] == [4, 2, 3]
    before.works[1].ended = before.works[2].ended = True
    assert [flight.is_done() for flight in flights] == [False, False]
    assert not after.posted
    before.works[0].ended = True
    assert [flight.is_done() for flight in flights] == [False, False]
    assert [memory.data_ptr() for memory in after.posted] == [memory.data_ptr() for memory in before.posted]
    for work in after.works[:2]:
        work.ended = True
    assert [flight.is_done() for flight in flights] == [True, False]


@pytest.mark.parametrize("failing", ["before", "after"])
def test_a_pair_that_fails_fails_the_broadcast(failing: str):
    pairs = {"before": Pair(), "after": Pair()}
    chain = Chain(pairs["before"], pairs["after"], segment_nbytes=4)
    flight = chain.broadcast(torch.zeros(4, dtype=torch.uint8))
    pairs["before"].works[0].ended = True
    if failing == "after":
        assert not flight.is_done()
    (work,) = pairs[failing].works
    work.ended, work.error = True, RuntimeError("Connection closed by peer")
    with pytest.raises(RuntimeError, match="closed by peer"):
        flight.is_done()
