"""What a report says of each member, and what the console says of a sync that took much longer than usual."""

from __future__ import annotations

import asyncio
import logging
import time
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
import torch

from tests.checkpoint_engine.fakes import RecordingReplica, RowShardedSource
from tests.cli.runs import PHASE_S, sync_report
from verl.checkpoint_engine.config import CheckpointEngineConfig
from verl.checkpoint_engine.links.traffic import Traffic, links_of
from verl.checkpoint_engine.plan.member_report import SLOWEST, Link, MemberTime, PhaseReport, busiest
from verl.checkpoint_engine.plan.types import SyncReport
from verl.checkpoint_engine.sync.manager import CheckpointEngineManager
from verl.checkpoint_engine.sync.outliers import LEAST_KNOWN, TIMES, outlier, slowest_of
from verl.checkpoint_engine.sync.rollout_node import RolloutNode
from verl.checkpoint_engine.sync.stopwatch import Stopwatch
from verl.checkpoint_engine.sync.trainer_rank import TrainerRank

NBYTES = 4 * 1000 * 64


def phase(*seconds: float, role: str = "node") -> PhaseReport:
    return PhaseReport.of(
        MemberTime(member=f"{role}-{number}", began_s=0.2, seconds=each, nbytes=1000)
        for number, each in enumerate(seconds)
    )


def manager_of(shm_dir: Path, backend: str, *, ranks: int = 2, nodes: int = 2) -> CheckpointEngineManager:
    config = CheckpointEngineConfig.from_mapping({"backend": backend})
    tensors = {"weight": torch.arange(64_000, dtype=torch.float32).reshape(1000, 64)}
    return CheckpointEngineManager(
        config=config,
        trainers=[TrainerRank(rank, RowShardedSource(tensors, rank, ranks), config) for rank in range(ranks)],
        nodes=[RolloutNode(node, config, job="members", shm_dir=shm_dir) for node in range(nodes)],
        report_path=shm_dir / "sync_reports.jsonl",
    )


async def synced(manager: CheckpointEngineManager, *replicas: RecordingReplica) -> SyncReport:
    try:
        await manager.add_replicas(replicas)
        return await manager.update_weights(1)
    finally:
        await manager.close()


async def test_bytes_may_be_told_in_the_turn_of_the_loop_in_which_a_call_ends():
    """As they are if the deadline is in that turn: whoever waits goes on before the time of the call is taken."""
    clock, call = Stopwatch(), asyncio.get_running_loop().create_future()
    clock.timed("stage", {"node-0": call})
    call.set_result(None)
    clock.moved("stage", {"node-0": 7})
    await asyncio.sleep(0)
    assert clock.members["stage"].nbytes == 7
    (member,) = clock.members["stage"].slowest
    assert (member.member, member.nbytes) == ("node-0", 7)


async def test_every_phase_names_its_members_with_seconds_and_bytes(tmp_path: Path):
    report = await synced(manager_of(tmp_path, "tcp"), RecordingReplica("replica-0"), RecordingReplica("replica-1", 1))
    named = {phase: {one.member for one in told.slowest} for phase, told in report.members.items()}
    ranks, nodes, replicas = {"trainer-0", "trainer-1"}, {"node-0", "node-1"}, {"replica-0", "replica-1"}
    assert named["prepare"] == named["publish"] == ranks | nodes
    assert named["stage"] == named["verify"] == named["commit"] == nodes
    assert named["activate"] == named["resume"] == replicas
    assert report.members["publish"].nbytes == NBYTES
    assert [one.nbytes for one in report.members["stage"].slowest] == [NBYTES, NBYTES]
    for name, told in report.members.items():
        assert 0 < told.slowest[0].seconds <= report.phase_s[name]
        assert all(0 <= one.began_s < report.total_s for one in told.slowest)


async def test_a_node_tells_from_whom_it_read_how_much(tmp_path: Path):
    report = await synced(manager_of(tmp_path, "tcp"))
    assert {(link.member, link.peer) for link in report.links} == {
        (f"node-{node}", f"trainer-{rank}") for node in range(2) for rank in range(2)
    }
    assert all(link.nbytes == NBYTES // 2 for link in report.links)
    assert all(0 < link.seconds <= report.phase_s["stage"] for link in report.links)


async def test_members_tell_how_much_memory_they_held(tmp_path: Path):
    report = await synced(manager_of(tmp_path, "tcp"))
    assert {(use.process, use.phase) for use in report.memory} == {
        *(("trainer-0", "publish"), ("trainer-1", "publish"), ("node-0", "stage"), ("node-1", "stage"))
    }
    assert all(use.host_peak_nbytes >= use.host_nbytes > 10**7 for use in report.memory)
    assert report.metrics()["memory/node/stage/host_peak_gb"] > 0.01


async def test_where_nobody_reads_over_links_there_are_none(tmp_path: Path):
    report = await synced(manager_of(tmp_path, "naive", nodes=1))
    assert report.links == ()
    assert {one.member for one in report.members["stage"].slowest} >= {"node-0"}


class Clock:
    """In place of `time` where a sync is measured: time passes only where a test says so."""

    time = staticmethod(time.time)

    def __init__(self) -> None:
        self.now = 0.0

    def perf_counter(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr("verl.checkpoint_engine.sync.stopwatch.time", clock)
    return clock


async def test_the_member_that_keeps_others_waiting_is_named(tmp_path: Path, clock: Clock):
    quick, slow = RecordingReplica(), RecordingReplica("replica-1", 1)

    async def takes_longer() -> None:
        while quick.version is None:  # noqa: ASYNC110 - a replica sets no event
            await asyncio.sleep(0)
        await asyncio.sleep(0)  # that it has ended is noted
        clock.now += 5.0

    slow.fail = lambda step: takes_longer() if step == "activate" else None
    report = await synced(manager_of(tmp_path, "tcp"), quick, slow)
    assert report.members["activate"].slowest[0].member == "replica-1"
    assert report.members["activate"].excess_s == 2.5
    assert slowest_of(report) == "replica-1 (activate)"
    assert report.metrics()["checkpoint_engine/slowest_wait_s"] == 2.5


async def test_what_is_written_can_be_read_again(tmp_path: Path):
    report = await synced(manager_of(tmp_path, "tcp"))
    assert msgspec.json.decode((tmp_path / "sync_reports.jsonl").read_bytes(), type=SyncReport) == report


def test_a_report_of_hundreds_of_members_stays_small():
    told = phase(*(1.0 + number for number in range(512)))
    assert (told.members, told.nbytes, len(told.slowest)) == (512, 512_000, SLOWEST)
    assert told.slowest[0].member == "node-511"
    assert told.median_s == pytest.approx(256.5)
    every = [Link(member=f"node-{n}", peer="trainer-0", nbytes=10**9, seconds=1.0 + n) for n in range(512)]
    links = busiest(every)
    assert links == tuple(every[: -SLOWEST - 1 : -1])
    report = sync_report(1, 0.0, members=dict.fromkeys(PHASE_S, told), links=links)
    assert len(msgspec.json.encode(report)) < 12_000


# --- outliers -------------------------------------------------------------------------------------------------------

USUAL = [sync_report(version, 10.0 * version) for version in range(10)]


def slow_stage(*seconds: float, links: tuple[Link, ...] = ()) -> SyncReport:
    more = {**PHASE_S, "stage": max(seconds)}
    return replace(sync_report(17, 200.0), phase_s=more, members={"stage": phase(*seconds)}, links=links)


def test_a_slow_sync_is_told_with_the_member_and_the_link_that_kept_it():
    link = Link(member="node-2", peer="trainer-5", nbytes=450_000_000, seconds=4.0)
    told = outlier(slow_stage(1.0, 1.0, 4.0, 1.0, links=(link,)), USUAL)
    assert told == (
        "version 17 took 4.8 s, and 1.8 s is usual; 3.0 s of it waiting for node-2's stage at 0.9 Gbit/s from trainer-5"
    )


def test_where_all_members_were_slow_nobody_is_blamed():
    assert outlier(slow_stage(4.0, 3.9, 4.0), USUAL) == (
        "version 17 took 4.8 s, and 1.8 s is usual; 3.0 s more in stage, on all of 3 members"
    )


def test_a_usual_sync_is_not_told():
    assert outlier(sync_report(17, 200.0), USUAL) is None
    assert outlier(slow_stage(1.4, 1.0), USUAL) is None


def test_a_sync_is_told_if_it_takes_twice_as_long_and_half_a_second_more():
    assert outlier(slow_stage(2.5), USUAL) is None  # 3.3 s where 1.8 is usual
    assert outlier(slow_stage(2.9), USUAL) is not None
    quick = [replace(one, phase_s={"stage": 0.1}) for one in USUAL]
    assert outlier(replace(slow_stage(0.5), phase_s={"stage": 0.5}), quick) is None
    assert outlier(replace(slow_stage(0.7), phase_s={"stage": 0.7}), quick) is not None


def test_few_syncs_do_not_say_what_is_usual():
    assert outlier(slow_stage(9.0), USUAL[: LEAST_KNOWN - 1]) is None
    assert outlier(slow_stage(9.0), USUAL[:LEAST_KNOWN]) is not None


@pytest.mark.parametrize("name", ["wait", "prepare"])
def test_a_wait_for_rollouts_and_new_members_make_no_outlier(name: str):
    assert outlier(replace(sync_report(17, 200.0), phase_s={**PHASE_S, name: 60.0}), USUAL) is None


def test_aborted_syncs_are_neither_told_nor_compared_with():
    aborted = [replace(one, outcome="aborted") for one in USUAL]
    assert outlier(replace(slow_stage(9.0), outcome="aborted"), USUAL) is None
    assert outlier(slow_stage(9.0), aborted) is None


def test_attempts_that_failed_are_told_where_they_took_the_time():
    retried = replace(sync_report(17, 200.0), retries=1, phase_s={**PHASE_S, "publish": 2.0, "stage": 2.5})
    assert outlier(retried, USUAL).endswith("; an attempt failed before")


def told_by_ours(caplog: pytest.LogCaptureFixture) -> list[str]:
    """asyncio tells of what earlier tests have left, too."""
    return [record.getMessage() for record in caplog.records if record.name.startswith("verl.")]


async def test_the_console_hears_of_an_outlier(tmp_path: Path, clock: Clock, caplog: pytest.LogCaptureFixture):
    manager = manager_of(tmp_path, "tcp", nodes=1)
    replica, takes_s = RecordingReplica(), 1.0

    def activates(step: str) -> None:
        clock.now += takes_s if step == "activate" else 0.0

    replica.fail = activates
    await manager.add_replicas([replica])
    try:
        with caplog.at_level(logging.WARNING, "verl.checkpoint_engine"):
            for version in range(LEAST_KNOWN):
                await manager.update_weights(version)
            assert told_by_ours(caplog) == []
            takes_s = TIMES
            await manager.update_weights(LEAST_KNOWN)
    finally:
        await manager.close()
    (said,) = told_by_ours(caplog)
    assert said.startswith(f"version {LEAST_KNOWN} took")
    assert said.endswith("more in activate, on replica-0")


# --- traffic --------------------------------------------------------------------------------------------------------


def test_a_peer_is_busy_while_at_least_one_transfer_is_under_way():
    traffic = Traffic()
    began = time.perf_counter()
    traffic.begin(0)
    traffic.begin(0)
    traffic.end(0, 10)
    time.sleep(0.02)
    traffic.end(0, 5)
    passed = time.perf_counter() - began
    time.sleep(0.02)
    assert traffic.nbytes == {0: 15}
    assert 0.02 <= traffic.seconds[0] <= passed


def test_loops_that_run_side_by_side_are_one_link():
    loops = [Traffic(), Traffic()]
    for loop, seconds in zip(loops, (1.0, 2.0), strict=True):
        loop.nbytes, loop.seconds = {3: 100}, {3: seconds}
    (link,) = links_of("node-0", loops, lambda peer: f"trainer-{peer}")
    assert link == Link(member="node-0", peer="trainer-3", nbytes=200, seconds=2.0)
