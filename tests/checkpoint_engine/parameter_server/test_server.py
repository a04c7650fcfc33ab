"""Checkpoints get from ParameterServers into engines bit-equal, by either way, one bucket behind the other."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.checkpoint_engine.fakes import soon
from tests.checkpoint_engine.parameter_server.rank_processes import BUCKET_GB, RankProcess, World, part_of
from verl.checkpoint_engine.errors import ConfigError, TransportError
from verl.checkpoint_engine.parameter_server.server import ParameterServer

SIZE = 3


def started(world: World) -> World:
    """Rank 2 has nothing of checkpoint `one`."""
    assert world.all("register", "one", 1, only=[0, 1]) == [None, None]
    assert world.all("gather", "one") == [SIZE] * SIZE
    return world


@pytest.fixture(scope="module")
def world() -> Iterator[World]:
    made = World(SIZE)
    try:
        yield started(made)
    finally:
        made.end()


def reports(answers: list[Any]) -> list[Any]:
    for answer in answers:
        if isinstance(answer, Exception):
            raise answer
    return answers


def test_a_broadcast_brings_all_parts_to_the_engines_of_all_ranks(world: World):
    made = reports(world.all("update", "one"))
    assert world.all("wrong", 1, [0, 1]) == [[]] * SIZE
    for report in made:
        assert (report.mode, report.ranks, report.staged) == ("broadcast", (0, 1, 2), True)
        assert report.bucket_nbytes == int(BUCKET_GB * 2**30)
        assert report.buckets >= 6
        assert report.nbytes >= sum(tensor.nbytes for rank in (0, 1) for tensor in part_of(rank, 1).values())


def test_a_script_for_checkpoint_engine_finds_its_names_and_arguments(world: World):
    for buckets in reports(world.all("run_as_with_checkpoint_engine", 5)):
        assert buckets.pop() == 0  # post_hook
        assert len(buckets) > 6
        assert sum(buckets) == sum(len(part_of(rank, 5)) for rank in range(SIZE))
    assert world.all("wrong", 5, range(SIZE)) == [[]] * SIZE
    world.all("gather", "one")


def test_a_place_to_meet_may_be_given_in_two_arguments(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", "1")
    with ParameterServer(rank=0, world_size=2, master_addr="host.invalid") as server:
        assert server._calls._master == "host.invalid:1"
    with ParameterServer(rank=0, world_size=2, master_port=29) as server:
        assert server._calls._master == "127.0.0.1:29"


def test_owners_broadcast_from_where_their_buckets_lie_and_fetch_nothing(world: World):
    for report in reports(world.all("update", "one")):
        assert [event for event in report.events if event.kind.startswith("fetch")] == []
        assert [event.bucket for event in report.events if event.kind == "load-end"] == list(range(report.buckets))


def test_p2p_brings_all_parts_to_some_ranks_and_the_others_return_at_once(world: World):
    # Rank 0 is told first, and answers before anybody else has been asked.
    assert world.ranks[0].submit("update", "one", [1, 2]).result(timeout=60) is None
    made = reports(world.all("update", "one", [2, 1], only=[1, 2]))
    assert world.all("wrong", 1, [0, 1], only=[1, 2]) == [[], []]
    assert [report.mode for report in made] == ["p2p", "p2p"]
    assert [report.ranks for report in made] == [(1, 2), (1, 2)]
    fetched = [[event.bucket for event in report.events if event.kind == "fetch-end"] for report in made]
    # With TCP every rank counts as a network card of its own: both receivers pull.
    assert sorted(fetched[0] + fetched[1]) == list(range(made[0].buckets))
    assert all(fetched)


def test_one_receiver_pulls_alone(world: World):
    (report,) = reports(world.all("update", "one", [2], only=[2]))
    assert world.all("wrong", 1, [0, 1], only=[2]) == [[]]
    assert not any(event.kind.startswith("broadcast") for event in report.events)


@pytest.fixture
def saved(world: World, tmp_path: Path) -> Path:
    reports(world.all("save", tmp_path / "metas", "one", only=[1]))
    return tmp_path / "metas"


def test_a_late_joiner_of_another_job_pulls_what_it_never_saw(world: World, saved: Path):
    """It has rank 0 in its own job; so has an owner in theirs."""
    joiner = RankProcess(0, 1, None)
    try:
        assert joiner.call("load", saved) == "one"
        report = joiner.call("update", "one", [0])
        assert joiner.call("wrong", 1, [0, 1]) == []
        assert report.ranks == (0,)
        # What the owners let go of is not taken for what they hold next, though it is in the same memory.
        reports(world.all("unregister", "one", only=[0, 1]))
        reports(world.all("register", "two", 2, only=[0, 1]))
        with pytest.raises(TransportError, match=r"rank \d at .* no longer holds the memory of the gathered metas"):
            joiner.call("update", "one", [0])
        reports(world.all("unregister", "two", only=[0, 1]))
        with pytest.raises(TransportError, match="reading from the P2P store at .*no longer|no longer holds"):
            joiner.call("update", "one", [0])
    finally:
        joiner.end()
        reports(world.all("register", "one", 1, only=[0, 1]))
        reports(world.all("gather", "one"))


def test_while_an_engine_loads_a_bucket_the_next_one_is_broadcast_and_another_fetched(world: World):
    """Of two receivers, each fetches every second bucket."""
    for ranks in (None, [1, 2]):
        made = reports(world.all("update", "one", ranks, engine="holds", only=ranks))
        for rank, report in enumerate(made):
            when = {(event.kind, event.bucket): event.time_s for event in report.events}
            assert when["load-start", 0] < when["broadcast-end", 1] < when["load-end", 0]
            if ranks:
                assert when["fetch-end", rank] < when["fetch-end", rank + 2] < when["load-end", 0]


def test_a_broadcast_begins_before_the_one_before_it_is_over(world: World):
    """Else nothing would be on the wire for a moment, after every bucket."""
    for report in reports(world.all("update", "one")):
        when = {(event.kind, event.bucket): event.time_s for event in report.events}
        assert any(when["broadcast-start", number + 1] < when["broadcast-end", number] for number in range(5))


def test_events_of_a_bucket_come_in_their_order(world: World):
    for report in reports(world.all("update", "one")):
        when = {(event.kind, event.bucket): event.time_s for event in report.events}
        for bucket in range(report.buckets):
            kinds = ("fetch-start", "fetch-end", "broadcast-start", "broadcast-end", "load-start", "load-end")
            times = [when[kind, bucket] for kind in kinds if (kind, bucket) in when]
            assert times == sorted(times)
            assert len(times) == 4


@pytest.mark.parametrize("ranks", [None, [1, 2]])
def test_without_memory_for_a_staging_bucket_it_works_too(world: World, ranks: list[int] | None):
    only = ranks or [0, 1, 2]
    made = reports(world.all("update", "one", ranks, memory_for=2.5, only=only))
    assert world.all("wrong", 1, [0, 1], only=only) == [[]] * len(only)
    assert not any(report.staged for report in made)


def test_with_less_memory_than_two_of_the_largest_tensor_nothing_is_tried(world: World):
    for answer in world.all("update", "one", memory_for=1.0):
        assert isinstance(answer, ConfigError)
        assert "two buckets need twice that" in str(answer)
    reports(world.all("update", "one"))


def test_a_name_that_was_not_gathered_is_refused_everywhere(world: World):
    for answer in world.all("update", "other"):
        assert isinstance(answer, ConfigError)
        assert "the metas are those of checkpoint 'one'" in str(answer)
    for answer in world.all("gather", "other"):
        assert isinstance(answer, ConfigError)
        assert "checkpoint 'other' is not registered on any of the 3 ranks" in str(answer)
    for answer in world.all("unregister", "other", only=[0, 2]):
        assert isinstance(answer, ConfigError)
        assert "'other' is not registered on rank" in str(answer)
    for answer in world.all("register", "one", 1, only=[0]):
        assert isinstance(answer, ConfigError)
        assert "'one' is registered already" in str(answer)
    reports(world.all("update", "one"))


def test_ranks_that_disagree_say_how(world: World):
    futures = [world.ranks[0].submit("gather", "one"), *(world.ranks[rank].submit("gather", "two") for rank in (1, 2))]
    for future in futures:
        with pytest.raises(ConfigError, match="rank 0 gathers the metas of checkpoint 'one', rank 1 'two'"):
            future.result()


def test_groups_that_were_connected_ahead_are_kept(world: World):
    world.all("connect", [0, 2])
    reports(world.all("update", "one", [0, 2], only=[0, 2]))  # and the memory for its buckets
    before = world.ranks[0].call("resources")
    for _ in range(2):
        reports(world.all("update", "one", [0, 2], only=[0, 2]))

    def after() -> dict[str, int]:
        return world.ranks[0].call("resources")

    assert soon(lambda: (after()["links"], after()["mapped"]) == (0, before["mapped"]))
    assert soon(lambda: after()["sockets"] <= before["sockets"] + 4)  # the P2P store's connections stay


def test_a_rank_alone_needs_nobody():
    alone = RankProcess(0, 1, None, auto_pg=True)
    try:
        alone.call("register", "mine", 3)
        alone.call("gather", "mine")
        alone.call("update", "mine")
        assert alone.call("wrong", 3, [0]) == []
        alone.call("close")
        assert alone.call("resources")["mapped"] == 0
    finally:
        alone.end()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"rank": 0}, "needs world_size: .* or as WORLD_SIZE"),
        ({"world_size": 2}, "needs rank: .* or as RANK"),
        ({"rank": 2, "world_size": 2}, "rank must be from 0 to world_size - 1 = 1, not 2"),
        ({"rank": -1, "world_size": 2}, "not -1"),
        ({"rank": 0, "world_size": 2, "gpu_count": 0}, "gpu_count must be between 1 and 2"),
        ({"rank": 0, "world_size": 2, "gpu_count": 3}, "gpu_count must be between 1 and 2"),
        ({"rank": 0, "world_size": 1, "mem_fraction": 0.0}, "mem_fraction must be greater than 0 and at most 1, not 0"),
        ({"rank": 0, "world_size": 1, "mem_fraction": 1.1}, "mem_fraction .* not 1.1"),
        ({"rank": 0, "world_size": 1, "mem_fraction": float("nan")}, "mem_fraction .* not nan"),
        ({"rank": 0, "world_size": 1, "timeout_s": 0}, "timeout_s must be positive"),
        ({"rank": 0, "world_size": 1, "p2p_protocol": "udp"}, "must be tcp or rdma"),
    ],
)
def test_arguments_are_checked_before_anything_starts(
    options: dict[str, Any], message: str, monkeypatch: pytest.MonkeyPatch
):
    for name in ("RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(ConfigError, match=message):
        ParameterServer(**options)


def test_arguments_win_over_the_environment_and_rank_0_is_one(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("RANK", "3")
    monkeypatch.setenv("WORLD_SIZE", "4")
    with ParameterServer() as server:
        assert (server.rank, server.world_size, server.mem_fraction) == (3, 4, 0.9)
    with ParameterServer(rank=0, mem_fraction=1.0, gpu_count=4) as server:
        assert (server.rank, server.world_size, server.mem_fraction) == (0, 4, 1.0)
        assert server.device_id == "cpu-0"
    monkeypatch.setenv("RANK", "three")
    with pytest.raises(ConfigError, match="RANK must be a number, not 'three'"):
        ParameterServer()
    with ParameterServer(rank=1) as server:
        assert server.rank == 1


def test_several_ranks_need_a_place_to_meet(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("MASTER_ADDR", raising=False)
    with (
        ParameterServer(rank=0, world_size=2) as server,
        pytest.raises(ConfigError, match="MASTER_ADDR and MASTER_PORT"),
    ):
        server.gather_metas("one")
