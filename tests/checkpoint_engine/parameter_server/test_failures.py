"""When one rank fails, the update ends on all with what went wrong first; nothing is left, the next one works."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.checkpoint_engine.fakes import soon
from tests.checkpoint_engine.parameter_server.rank_processes import RankProcess, World
from verl.checkpoint_engine.errors import ActivationError, TransportError, TransportTimeout

pytestmark = pytest.mark.cells(2)

SIZE = 3
TIMEOUT_S = 60.0
PATIENCE_S = 3 * TIMEOUT_S
AWAITED_S = 20.0
"""Of an update that waits in vain. Those beside it have the server's longer time, also on a busy machine."""


@pytest.fixture(scope="module", params=[False, True], ids=["kept groups", "auto_pg"])
def world(request: pytest.FixtureRequest) -> Iterator[World]:
    made = World(SIZE, auto_pg=request.param, timeout_s=TIMEOUT_S)
    try:
        made.all("register", "one", 1)
        assert made.all("gather", "one") == [SIZE] * SIZE
        yield made
    finally:
        made.end()


def more_than(before: list[dict[str, int]], world: World) -> list[dict[str, int]]:
    """What each rank holds beyond `before`, once that is nothing or an update has passed its deadline.

    A failure may leave a broadcast half sent between two ranks that both live: gloo holds it until then.
    """
    end = time.monotonic() + 1.5 * TIMEOUT_S
    while True:
        found = world.all("resources")
        pairs = zip(found, before, strict=True)
        more = [{kind: now[kind] for kind in now if now[kind] > then[kind]} for now, then in pairs]
        if not any(more) or time.monotonic() > end:
            return more
        time.sleep(0.1)


def at_rest(world: World) -> list[dict[str, int]]:
    """The resources of all ranks, when those of an update before are closed: the same for two seconds."""
    found, since = None, time.monotonic()
    while time.monotonic() - since < 2:
        if found != (found := world.all("resources")):
            since = time.monotonic()
        time.sleep(0.25)
    assert found is not None
    return found


def behaviours(world: World, failing: dict[int, str], **options: Any) -> list[Any]:
    """What each rank's update ends with, when some engines misbehave."""
    futures = [rank.submit("update", "one", engine=failing.get(rank.rank, "loads"), **options) for rank in world.ranks]
    return [future.exception(timeout=PATIENCE_S) for future in futures]


@pytest.mark.parametrize(
    ("failing", "kind", "message"),
    [
        ({1: "refuses"}, ActivationError, "ValueError: a tensor does not fit"),
        ({0: "refuses", 2: "refuses"}, ActivationError, "ValueError: a tensor does not fit"),
        ({2: "is_down"}, ActivationError, "the request .* failed: ConnectionError: http://engine:8000 refused"),
    ],
)
def test_what_one_engine_says_ends_the_update_on_all_ranks_and_the_next_one_works(
    world: World, failing: dict[int, str], kind: type[Exception], message: str
):
    assert behaviours(world, {}) == [None] * SIZE
    before = at_rest(world)
    ends = behaviours(world, failing)
    for end in ends:
        assert isinstance(end, kind)
        with pytest.raises(kind, match=message):
            raise end
        assert any(f"rank {rank}" in str(end) or f"cpu-{rank}" in str(end) for rank in failing)
    assert behaviours(world, {}) == [None] * SIZE
    assert world.all("wrong", 1, range(SIZE)) == [[]] * SIZE
    assert more_than(before, world) == [{}] * SIZE


def test_an_engine_that_never_comes_is_named_at_the_deadline():
    world = World(2, timeout_s=TIMEOUT_S)
    try:
        world.all("register", "one", 1)
        world.all("gather", "one")
        ends = behaviours(world, {1: "is_silent"}, within_s=AWAITED_S)
        for end in ends:
            assert isinstance(end, TransportTimeout)
        assert "cpu-1" in str(ends[1])
        assert "the engine has not connected" in str(ends[1])
        # A rank that stops answers nothing, and is named by the one that waits.
        futures = [
            rank.submit("update", "one", engine=engine, within_s=AWAITED_S)
            for rank, engine in zip(world.ranks, ("loads", "stalls"), strict=True)
        ]
        with pytest.raises(TransportError, match="rank 1"):
            futures[0].result(timeout=PATIENCE_S)
        world.ranks[1].send_signal(signal.SIGCONT)
        assert isinstance(futures[1].exception(timeout=PATIENCE_S), Exception)
        assert behaviours(world, {}) == [None, None]
    finally:
        world.end()


@pytest.mark.parametrize("doomed", [0, 2])
def test_a_rank_that_is_killed_ends_the_update_on_the_others(doomed: int):
    """Rank 0 hosts the store in which the others meet. What it leaves half sent is let go of at the deadline."""
    world = World(SIZE, timeout_s=TIMEOUT_S)
    others = [rank for rank in world.ranks if rank.rank != doomed]
    try:
        world.all("register", "one", 1)
        world.all("gather", "one")
        before = [rank.call("resources") for rank in others]
        futures = {
            rank.rank: rank.submit("update", "one", engine="dies" if rank.rank == doomed else "loads")
            for rank in world.ranks
        }
        for rank in others:
            with pytest.raises(TransportError, match=f"rank {doomed}|process has ended") as raised:
                futures[rank.rank].result(timeout=PATIENCE_S)
            assert not isinstance(raised.value, TransportTimeout)  # noticed, not waited for
        for rank, allowed in zip(others, before, strict=True):
            assert rank.call("resources")["links"] == 0
            assert soon(lambda r=rank, b=allowed: r.call("resources")["mapped"] == b["mapped"], PATIENCE_S)
    finally:
        world.end()


def test_an_owner_that_was_killed_is_named_by_its_address(tmp_path: Path):
    """Owners take no part in P2P updates, so nobody but the reader notices."""
    owner, joiner = RankProcess(0, 1, None), RankProcess(0, 1, None)
    try:
        for method, *values in (("register", "mine", 1), ("gather", "mine"), ("save", tmp_path / "metas", "mine")):
            owner.call(method, *values)
        joiner.call("load", tmp_path / "metas")
        joiner.call("update", "mine", [0])
        owner.send_signal(signal.SIGKILL)
        with pytest.raises(TransportError, match=r"reading from the P2P store at [\d.]+:\d+"):
            joiner.submit("update", "mine", [0]).result(timeout=PATIENCE_S)
        assert joiner.call("resources")["links"] == 0
    finally:
        owner.end()
        joiner.end()


def test_a_rank_that_does_not_come_is_named_and_is_welcome_later():
    world = World(2, timeout_s=TIMEOUT_S)
    try:
        world.all("register", "one", 1)
        world.all("gather", "one")
        with pytest.raises(TransportTimeout, match=r"rank 1 not here within 12.0 s; here: rank 0"):
            world.ranks[0].submit("update", "one", within_s=12.0).result(timeout=PATIENCE_S)
        assert behaviours(world, {}) == [None, None]
    finally:
        world.end()
