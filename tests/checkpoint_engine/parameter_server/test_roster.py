"""Ranks that meet in a store: here threads of one process, each with a connection of its own."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import pytest
from torch._C._distributed_c10d import TCPStore

from verl.checkpoint_engine.errors import ActivationError, TransportError, TransportTimeout
from verl.checkpoint_engine.links.rendezvous import Deadline
from verl.checkpoint_engine.parameter_server.roster import Roster


class PassesWhen(Deadline):
    """A deadline that passes as soon as something is so; a minute only ends what hangs."""

    def __init__(self, happened: Callable[[], bool]) -> None:
        super().__init__(60.0)
        self.happened = happened

    @property
    def passed(self) -> bool:
        return self.happened() or super().passed


class Place:
    def __init__(self) -> None:
        self.server = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=30))

    def store(self) -> TCPStore:
        port = self.server.port
        return TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=30))

    @contextmanager
    def roster(self, rank: int, ranks: list[int], **options: Any) -> Iterator[Roster]:
        roster = Roster(self.store(), rank, ranks, **options)
        try:
            yield roster
        finally:
            roster.leave()


@pytest.fixture
def place() -> Place:
    return Place()


def together(*calls: Callable[[], Any]) -> list[Future[Any]]:
    with ThreadPoolExecutor(len(calls)) as pool:
        return [pool.submit(call) for call in calls]


def meeting(place: Place, rank: int, ranks: list[int], timeout_s: float = 20.0) -> tuple[str, dict[int, Any]]:
    with place.roster(rank, ranks) as roster:
        deadline = Deadline(timeout_s)
        roster.meet(deadline)
        answers = roster.exchange("square", rank * rank, deadline)
        roster.part()
        return roster.session, answers


def test_all_ranks_hear_what_every_rank_says_in_a_session_that_is_new_each_time(place: Place):
    sessions = set()
    for _ in range(3):
        results = [
            future.result() for future in together(*(lambda r=r: meeting(place, r, [1, 4, 9]) for r in (9, 4, 1)))
        ]
        assert [answers for _, answers in results] == [{1: 1, 4: 16, 9: 81}] * 3
        (session,) = {session for session, _ in results}
        sessions.add(session)
    assert len(sessions) == 3


def test_nothing_of_former_sessions_piles_up_in_the_store(place: Place):
    counts = []
    for _ in range(3):
        for future in together(*(lambda r=r: meeting(place, r, [0, 1]) for r in range(2))):
            future.result()
        counts.append(place.server.num_keys())
    assert counts[0] == counts[2]


def test_threads_end_with_the_session(place: Place):
    before = set(threading.enumerate())
    together(*(lambda r=r: meeting(place, r, [0, 1]) for r in range(2)))
    assert not [thread for thread in set(threading.enumerate()) - before if thread.name == "parameter-server-roster"]


@pytest.mark.parametrize("absent", [0, 1])
def test_a_rank_that_does_not_come_is_named(place: Place, absent: int):
    present = [rank for rank in range(3) if rank != absent]
    rosters: list[Roster] = []

    def have_seen_each_other() -> bool:
        return len(rosters) == len(present) and all(roster._came >= set(present) for roster in rosters)

    def come(rank: int) -> None:
        with place.roster(rank, [0, 1, 2]) as roster:
            rosters.append(roster)
            roster.meet(PassesWhen(have_seen_each_other))

    for future in together(*(lambda r=r: come(r) for r in present)):
        with pytest.raises(
            TransportTimeout, match=rf"^rank {absent} not here within 60.0 s; here: rank {present[0]}, "
        ):
            future.result()
    # Those calls are forgotten: the next meeting is one of calls made now.
    futures = together(*(lambda r=r: meeting(place, r, [0, 1, 2]) for r in range(3)))
    assert {future.result()[0] for future in futures} != {""}


def test_a_rank_whose_deadline_ends_first_was_here_all_the_same(place: Place):
    rosters: dict[int, Roster] = {}
    gone = threading.Event()

    def have_seen_each_other() -> bool:
        return len(rosters) == 2 and all(roster._came >= {0, 2} for roster in rosters.values())

    def patient() -> None:
        with place.roster(2, [0, 1, 2]) as rosters[2]:
            rosters[2].meet(PassesWhen(gone.is_set))

    def impatient() -> None:
        with place.roster(0, [0, 1, 2]) as rosters[0]:
            try:
                rosters[0].meet(PassesWhen(have_seen_each_other))
            finally:
                gone.set()

    first, last = together(impatient, patient)
    for future in (first, last):
        with pytest.raises(TransportTimeout, match="^rank 1 not here"):
            future.result()


def test_a_rank_that_says_nothing_is_named(place: Place):
    done = threading.Event()

    def silent() -> None:
        with place.roster(1, [0, 1]) as roster:
            roster.meet(Deadline(60))
            done.wait()

    def waiting() -> None:
        try:
            with place.roster(0, [0, 1]) as roster:
                roster.meet(Deadline(60))
                roster.exchange("sizes", 5, Deadline(2.0))
        finally:
            done.set()

    late, _ = together(waiting, silent)
    with pytest.raises(TransportTimeout, match="^rank 1 has not finished 'sizes' within 2.0 s; done: rank 0"):
        late.result()


def test_a_failure_reaches_every_rank_as_what_it_was(place: Place):
    told: list[str] = []

    def failing() -> None:
        with place.roster(2, [0, 1, 2]) as roster:
            roster.meet(Deadline(60))
            raise roster.fail(ActivationError("the engine refused it"), origin=True)

    def waiting(rank: int) -> None:
        with place.roster(rank, [0, 1, 2], on_failure=lambda error: told.append(str(error))) as roster:
            roster.meet(Deadline(60))
            roster.exchange("done", None, Deadline(60))

    for future in together(failing, lambda: waiting(0), lambda: waiting(1)):
        with pytest.raises(ActivationError, match=r"^\[rank 2\] the engine refused it$"):
            future.result()
    assert told == ["[rank 2] the engine refused it"] * 2


def test_a_failure_at_its_origin_explains_those_that_followed(place: Place):
    ready = threading.Event()

    def origin() -> None:
        with place.roster(1, [0, 1]) as roster:
            roster.meet(Deadline(60))
            ready.wait()
            raise roster.fail(ActivationError("it began here"), origin=True)

    def follower() -> None:
        with place.roster(0, [0, 1]) as roster:
            roster.meet(Deadline(60))
            ready.set()
            raise roster.fail(TransportError("a connection broke"), origin=False)

    for future in together(origin, follower):
        with pytest.raises(ActivationError, match="it began here"):
            future.result()


def test_a_rank_that_vanished_is_named_in_the_error_of_a_broken_connection(place: Place):
    gone = threading.Event()

    def vanishing() -> None:
        with place.roster(1, [0, 1]) as roster:
            roster.meet(Deadline(60))
            roster.exchange("start", None, Deadline(60))
        gone.set()

    def left_behind() -> None:
        with place.roster(0, [0, 1]) as roster:
            roster.meet(Deadline(60))
            roster.exchange("start", None, Deadline(60))
            gone.wait(60)
            raise roster.fail(TransportError("a connection broke"), origin=False)

    futures = together(vanishing, left_behind)
    with pytest.raises(TransportError, match=r"a connection broke; no sign of life from rank 1"):
        futures[1].result()
