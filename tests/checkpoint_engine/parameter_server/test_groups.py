"""A process group whose other rank leaves something unfinished. Both ranks are threads of this process."""

from __future__ import annotations

import gc
import itertools
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import numpy as np
import pytest
import torch
from torch._C._distributed_c10d import TCPStore

from tests.checkpoint_engine.fakes import soon
from tests.checkpoint_engine.test_collective import native_threads
from verl.checkpoint_engine.config import GlooOptions
from verl.checkpoint_engine.errors import TransportError, TransportTimeout
from verl.checkpoint_engine.links.communicators import Gloo
from verl.checkpoint_engine.links.rendezvous import Deadline
from verl.checkpoint_engine.parameter_server import groups
from verl.checkpoint_engine.parameter_server.groups import Group

RANKS = [0, 1]
DEVICE = torch.device("cpu")
TIMEOUT_S = 120.0
"""Of the groups; a single deadline may come long before."""


def go_on() -> None:
    pass


def failing_once(happened: Callable[[], bool]) -> Callable[[], None]:
    def check() -> None:
        if happened():
            raise TransportError("somebody else failed")

    return check


@pytest.fixture
def store() -> TCPStore:
    return TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=TIMEOUT_S))


@pytest.fixture
def threads() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(len(RANKS)) as pool:
        yield pool


@pytest.fixture(autouse=True)
def nothing_stays_behind() -> Iterator[None]:
    before = native_threads("gloo_tcp_loop")
    yield
    gc.collect()  # errors hold on to their groups
    assert soon(lambda: native_threads("gloo_tcp_loop") <= before)


class Silent(Group):
    """Is connected, and says nothing."""

    def greet(self, *_: object) -> None:
        pass


def connect(store: TCPStore, rank: int, kind: type[Group] = Group, check: Callable[[], None] = go_on) -> Group:
    return kind.connect(
        Gloo(GlooOptions(interface="lo")),
        store,
        rank=rank,
        ranks=RANKS,
        session="test",
        device=DEVICE,
        deadline=Deadline(TIMEOUT_S),
        check=check,
    )


def test_a_broadcast_that_never_comes_keeps_its_memory_until_the_deadline_not_until_the_timeout_of_the_group(
    store: TCPStore, threads: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(groups, "LATER_S", 10.0)  # until gloo lets go of it
    ours, theirs = [made.result() for made in [threads.submit(connect, store, rank) for rank in RANKS]]
    memory = np.zeros(1024, np.uint8)
    alive = weakref.ref(memory)
    deadline = Deadline(1.0)
    ours.broadcast(torch.from_numpy(memory), 1, deadline, go_on)
    with pytest.raises(TransportTimeout, match=r"the broadcast of rank 1 not done within 1\.0 s"):
        ours.land(deadline, go_on)
    ours.close()
    del memory
    assert alive() is not None
    assert soon(lambda: alive() is None, TIMEOUT_S / 2)
    theirs.close()


def test_a_rank_that_says_nothing_once_connected_keeps_nobody_from_failing(
    store: TCPStore, threads: ThreadPoolExecutor
):
    silent = threads.submit(connect, store, 1, Silent)
    with pytest.raises(TransportError, match="somebody else failed"):
        connect(store, 0, check=failing_once(silent.done))
    late = silent.result()
    Group.greet(late, DEVICE, Deadline(TIMEOUT_S), go_on)  # or gloo waits 155 s for the connections
    late.close()


def test_a_rank_that_tells_nothing_keeps_nobody_who_gathers_from_failing(store: TCPStore, threads: ThreadPoolExecutor):
    ours, theirs = [made.result() for made in [threads.submit(connect, store, rank) for rank in RANKS]]
    looks = itertools.count()
    with pytest.raises(TransportError, match="somebody else failed"):
        ours.all_gather(b"metas", DEVICE, Deadline(TIMEOUT_S), failing_once(lambda: next(looks) > 3))
    ours.close()
    theirs.close()
