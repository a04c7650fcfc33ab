"""A sync that fails, wherever it fails, ends in a named state; the next one works."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.checkpoint_engine.fakes import (
    Fleet,
    RecordingReplica,
    RowShardedSource,
    arenas_in,
    raising,
    soon,
    spare_slot,
)
from verl.checkpoint_engine.errors import (
    ActivationError,
    CheckpointEngineError,
    ConfigError,
    IntegrityError,
    PlanError,
    SyncAborted,
    TransportError,
    TransportTimeout,
)
from verl.checkpoint_engine.memory.committed import committed_version
from verl.checkpoint_engine.plan.types import Shard
from verl.checkpoint_engine.sync.trainer_rank import TrainerRank

DEADLINE_S = 3600.0
"""Of a phase in which somebody stalls. It has passed when who stalls is all that is waited for."""
OVER_GLOO: dict[str, Any] = {"backend": "gloo", "engine_kwargs": {"gloo": {"interface": "lo"}}, "retries": 0}


def weights(version: int) -> dict[str, torch.Tensor]:
    return {"w": torch.full((64, 32), float(version)), "norm": torch.full((7,), -float(version))}


class Stalling:
    """Called by a member or a replica, never ends. `wait` is asyncio's for the product, whose DEADLINE_S has passed as
    soon as every other call has ended, however long those take."""

    def __init__(self) -> None:
        self.calls = 0
        """So many do not end at present."""

    async def __call__(self) -> None:
        self.calls += 1
        try:
            await asyncio.Event().wait()
        finally:
            self.calls -= 1

    async def wait(
        self, tasks: Collection[asyncio.Future[Any]], timeout: float, return_when: str = asyncio.ALL_COMPLETED
    ) -> tuple[set[asyncio.Future[Any]], set[asyncio.Future[Any]]]:
        if timeout != DEADLINE_S:
            return await asyncio.wait(tasks, timeout=timeout, return_when=return_when)
        while True:
            done, left = await asyncio.wait(tasks, timeout=0.01, return_when=return_when)
            failed = return_when == asyncio.FIRST_EXCEPTION and any(task.exception() for task in done)
            if failed or len(left) <= self.calls:
                return done, left


stalling = Stalling()


@pytest.fixture(autouse=True)
def _deadlines_pass_for_who_stalls(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stalling, "calls", 0)
    monkeypatch.setattr("verl.checkpoint_engine.sync.deadline.wait", stalling.wait)


def at(step: str, action: Callable[[], Any]) -> Callable[[str], Any]:
    """For `RecordingReplica.fail`: do `action` at that step and nothing at the others."""
    return lambda name: action() if name == step else None


def flip_a_byte(path: Path, offset: int = 5000) -> None:
    with path.open("r+b") as file:
        file.seek(offset)
        (byte,) = file.read(1)
        file.seek(offset)
        file.write(bytes([byte ^ 1]))


def assert_serves(replica: RecordingReplica, version: int) -> None:
    assert replica.version == version
    assert not replica.paused
    assert all(torch.equal(replica.weights[name], tensor) for name, tensor in weights(version).items())


def assert_all_serve(fleet: Fleet, version: int) -> None:
    for replica in fleet.replicas:
        assert_serves(replica, version)


async def sync(fleet: Fleet, version: int) -> Any:
    fleet.set_weights(weights(version))
    return await fleet.manager.update_weights(version)


async def aborted(fleet: Fleet, version: int) -> SyncAborted:
    with pytest.raises(SyncAborted) as raised:
        await sync(fleet, version)
    assert raised.value.version == version
    return raised.value


# --- publish, stage, verify -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "method", "phase"),
    [
        ("nodes", "begin", "publish"),
        ("trainers", "publish", "publish"),
        ("nodes", "stage", "stage"),
        ("nodes", "verify", "verify"),
    ],
)
@pytest.mark.parametrize(
    "error_class", [TransportError, IntegrityError, ConfigError, OSError], ids=lambda error_class: error_class.__name__
)
async def test_a_member_that_fails_before_commit_leaves_the_old_version_in_service(
    kind: str, method: str, phase: str, error_class: type[Exception], tmp_path: Path
):
    async with Fleet(weights(0), tmp_path, trainers=2, nodes=2, replicas=2) as fleet:
        await sync(fleet, 1)
        member = getattr(fleet, kind)[1]
        member.before[method] = raising(error_class("it broke"))
        abort = await aborted(fleet, 2)
        assert (abort.phase, abort.member) == (phase, member.name)
        cause = abort.__cause__
        assert isinstance(cause, CheckpointEngineError)
        assert (cause.version, cause.phase, cause.member) == (2, phase, member.name)
        assert "it broke" in str(cause)
        assert [committed_version(path) for path in arenas_in(tmp_path)] == [1, 1]
        assert fleet.manager.version == 1
        for replica in fleet.replicas:
            assert_serves(replica, 1)
            assert replica.log.count("pause") == 1
        member.before.clear()
        await sync(fleet, 3)
        assert_all_serve(fleet, 3)


@pytest.mark.parametrize("version", [1, 2, 3])
async def test_others_in_the_place_of_trainer_ranks_may_make_a_version_once_more(version: int, tmp_path: Path):
    async with Fleet(weights(0), tmp_path, **OVER_GLOO) as fleet:
        for earlier in (1, 2):
            assert (await sync(fleet, earlier)).attempt == 0
        new = [TrainerRank(rank, source, fleet.config, host="a") for rank, source in enumerate(fleet.sources)]
        gone = fleet.trainers
        await fleet.manager.replace_trainers(new)
        for rank in gone:
            await rank.close()
        assert_serves(fleet.replicas[0], 2)
        assert (await sync(fleet, version)).attempt == 1
        assert_serves(fleet.replicas[0], version)


@pytest.mark.parametrize("method", ["publish", "published"])
@pytest.mark.parametrize("error", [KeyError("w"), TypeError("no tensor"), AssertionError("shapes"), ConfigError("NaN")])
async def test_what_is_no_transports_failure_is_not_tried_again(method: str, error: Exception, tmp_path: Path):
    async with Fleet(weights(0), tmp_path, retries=3) as fleet:
        await sync(fleet, 1)
        fleet.trainers[1].before[method] = raising(error, times=1)
        abort = await aborted(fleet, 2)
        assert (abort.phase, abort.member) == ("publish", "trainer-1")
        assert str(error.args[0]) in str(abort)
        assert_serves(fleet.replicas[0], 1)


async def test_nodes_open_their_slots_while_ranks_copy_unless_the_ranks_write_into_them(tmp_path: Path):
    async with Fleet(weights(0), tmp_path, **OVER_GLOO) as fleet:
        copying = asyncio.Event()
        fleet.trainers[1].before["publish"] = copying.set
        fleet.nodes[0].before["begin"] = lambda: asyncio.wait_for(copying.wait(), 60)
        await sync(fleet, 1)
        assert_serves(fleet.replicas[0], 1)


async def test_a_slot_that_cannot_be_opened_while_ranks_copy_is_a_failed_publish(tmp_path: Path):
    async with Fleet(weights(0), tmp_path, **OVER_GLOO) as fleet:
        await sync(fleet, 1)
        fleet.nodes[0].before["begin"] = raising(TransportError("no space left"))
        fleet.trainers[1].before["publish"] = stalling
        abort = await aborted(fleet, 2)
        assert (abort.phase, abort.member) == ("publish", "node-0")
        assert_serves(fleet.replicas[0], 1)
        fleet.nodes[0].before.clear()
        fleet.trainers[1].before.clear()
        await sync(fleet, 3)
        assert_serves(fleet.replicas[0], 3)


@pytest.mark.parametrize(
    ("kind", "method", "phase"),
    [("trainers", "publish", "publish"), ("nodes", "stage", "stage"), ("nodes", "verify", "verify")],
)
async def test_a_member_that_stalls_is_given_up_at_the_deadline_and_named(
    kind: str, method: str, phase: str, tmp_path: Path
):
    config = {"deadlines": {f"{phase}_s": DEADLINE_S}, "retries": 0}
    async with Fleet(weights(0), tmp_path, trainers=2, nodes=2, replicas=2, **config) as fleet:
        await sync(fleet, 1)
        waited_for, done = getattr(fleet, kind)[1], getattr(fleet, kind)[0]
        waited_for.before[method] = stalling
        abort = await aborted(fleet, 2)
        assert isinstance(abort.__cause__, TransportTimeout)
        assert f"{waited_for.name} not done within {DEADLINE_S} s; done: {done.name}" in str(abort.__cause__)
        assert_all_serve(fleet, 1)
        waited_for.before.clear()
        await sync(fleet, 3)
        assert_all_serve(fleet, 3)


async def test_a_trainer_thread_that_wakes_up_after_its_deadline_damages_nothing(tmp_path: Path):
    config = {"deadlines": {"publish_s": DEADLINE_S}, "retries": 0}
    async with Fleet(weights(0), tmp_path, trainers=2, **config) as fleet:
        await sync(fleet, 1)
        copy = fleet.sources[0].copy
        woke_up, given_up = asyncio.Event(), threading.Event()
        loop = asyncio.get_running_loop()

        def slow_copy(shard: Any, destination: torch.Tensor) -> None:
            stalling.calls += not given_up.is_set()
            assert given_up.wait(60)
            destination.fill_(66.0)
            loop.call_soon_threadsafe(woke_up.set)

        fleet.sources[0].copy = slow_copy
        await aborted(fleet, 2)
        stalling.calls -= 1
        fleet.sources[0].copy = copy
        given_up.set()
        await woke_up.wait()
        await sync(fleet, 3)
        assert_serves(fleet.replicas[0], 3)
        late = RecordingReplica("late")
        await fleet.manager.add_replicas([late])
        assert_serves(late, 3)


async def test_a_replica_that_catches_up_is_not_left_paused_by_who_gives_up(tmp_path: Path):
    async with Fleet(weights(0), tmp_path) as fleet:
        await sync(fleet, 1)
        late, loads, goes_on = RecordingReplica("late"), asyncio.Event(), asyncio.Event()

        async def waits() -> None:
            loads.set()
            await goes_on.wait()

        late.fail = lambda step: waits() if step == "activate" else None
        adding = asyncio.ensure_future(fleet.manager.add_replicas([late]))
        await loads.wait()
        adding.cancel()
        await asyncio.sleep(0)
        goes_on.set()
        with pytest.raises(asyncio.CancelledError):
            await adding
        assert not late.paused
        assert_serves(late, 1)


async def test_a_failure_that_goes_away_is_retried_and_counted(tmp_path: Path):
    async with Fleet(weights(0), tmp_path, retries=2) as fleet:
        await sync(fleet, 1)
        fleet.nodes[0].before["stage"] = raising(TransportError("hiccup"), times=2)
        report = await sync(fleet, 2)
        assert report.retries == 2
        assert report.outcome == "committed"
        assert report.nbytes_moved == 3 * report.nbytes_needed
        assert report.total_s == pytest.approx(sum(report.phase_s.values()))
        assert_serves(fleet.replicas[0], 2)


async def test_a_failure_that_stays_is_retried_as_often_as_configured(tmp_path: Path):
    async with Fleet(weights(0), tmp_path, retries=2) as fleet:
        fleet.trainers[0].before["publish"] = raising(TransportError("cut"))
        await aborted(fleet, 1)
        assert fleet.trainers[0].calls.count("publish") == 3


@pytest.mark.parametrize("kind", ["trainers", "nodes"])
async def test_a_member_that_does_not_answer_is_not_waited_for_in_another_attempt(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    monkeypatch.setattr("verl.checkpoint_engine.sync.membership.ANSWERS_WITHIN_S", DEADLINE_S)
    async with Fleet(weights(0), tmp_path, deadlines={"prepare_s": 2 * DEADLINE_S}) as fleet:
        await sync(fleet, 1)
        fleet.nodes[0].before["stage"] = raising(TransportError("nothing comes"))
        silent = getattr(fleet, kind)[0]
        silent.before |= dict.fromkeys(("ping", "prepare", "connect"), stalling)
        error = await aborted(fleet, 2)
        assert error.message == "the previous version stays in service: TransportError: nothing comes"
        assert f"cannot connect again: [prepare] {silent.name} not done within {DEADLINE_S} s" in caplog.text
        assert_serves(fleet.replicas[0], 1)
        silent.before.clear()
        fleet.nodes[0].before.clear()
        await sync(fleet, 3)
        assert_serves(fleet.replicas[0], 3)


async def test_what_cannot_get_better_is_not_retried(tmp_path: Path):
    async with Fleet(weights(0), tmp_path, retries=5) as fleet:
        fleet.nodes[0].before["begin"] = raising(ConfigError("no memory"))
        await aborted(fleet, 1)
        assert fleet.nodes[0].calls.count("begin") == 1


async def test_a_byte_that_flips_on_the_way_once_is_found_and_sent_again(tmp_path: Path):
    async with Fleet(weights(0), tmp_path) as fleet:
        await sync(fleet, 1)
        flips = iter([flip_a_byte])
        fleet.nodes[0].before["verify"] = lambda: next(flips, lambda _: None)(spare_slot(tmp_path))
        report = await sync(fleet, 2)
        assert report.retries == 1
        assert_serves(fleet.replicas[0], 2)


async def test_a_byte_that_flips_on_the_way_every_time_aborts_and_names_the_tensor(tmp_path: Path):
    async with Fleet(weights(0), tmp_path) as fleet:
        await sync(fleet, 1)
        fleet.nodes[0].before["verify"] = lambda: flip_a_byte(spare_slot(tmp_path))
        abort = await aborted(fleet, 2)
        assert isinstance(abort.__cause__, IntegrityError)
        assert "w[32:64, 0:32] (bytes 4096..8192, from trainer-1)" in str(abort)
        assert_serves(fleet.replicas[0], 1)
        fleet.nodes[0].before.clear()
        await sync(fleet, 3)
        assert_serves(fleet.replicas[0], 3)


async def test_digests_that_do_not_arrive_are_an_integrity_error_of_that_rank(tmp_path: Path):
    async with Fleet(weights(0), tmp_path, retries=0) as fleet:
        trainer = fleet.trainers[1].member

        class Forgetful:
            name = "trainer-1"

            async def publish(self, version: int, slots: Any, waits: bool) -> None:
                await trainer.publish(version, slots, waits)

            async def published(self, version: int) -> Any:
                published = await trainer.published(version)
                return replace(published, digests=published.digests[: -np.uint64().nbytes])

        await sync(fleet, 1)
        fleet.trainers[1].member = Forgetful()
        abort = await aborted(fleet, 2)
        assert isinstance(abort.__cause__, IntegrityError)
        assert "trainer-1 sent 1 digests for 2 pieces" in str(abort)


async def test_without_verification_nothing_is_digested_on_the_node(tmp_path: Path):
    async with Fleet(weights(0), tmp_path, verify=False) as fleet:
        report = await sync(fleet, 1)
        assert "verify" not in fleet.nodes[0].calls
        assert report.phase_s["verify"] == 0


async def test_a_trainer_that_is_released_may_change_its_weights_when_they_are_copied(tmp_path: Path):
    async with Fleet(weights(1), tmp_path, nodes=2, replicas=2) as fleet:
        await fleet.manager.update_weights(1)
        fleet.set_weights(weights(2))
        seen = []

        def released() -> None:
            seen.extend(fleet.nodes[0].calls)
            for trainer in fleet.trainers:
                trainer.member.await_copied()
            fleet.set_weights(weights(3))  # it trains on

        report = await fleet.manager.update_weights(2, released=released)
        assert "stage" not in seen[seen.index("commit") :]
        assert (report.outcome, report.version) == ("committed", 2)
        assert_all_serve(fleet, 2)


class HeldSource(RowShardedSource):
    """Copies when it may."""

    def __init__(self, tensors: Mapping[str, torch.Tensor], rank: int, world_size: int, dtype: str | None = None):
        super().__init__(tensors, rank, world_size, dtype)
        self.may_copy = threading.Event()
        self.may_copy.set()

    def copy(self, shard: Shard, destination: torch.Tensor) -> None:
        assert self.may_copy.wait(60)
        super().copy(shard, destination)


async def test_a_trainer_goes_on_while_its_weights_are_copied_and_waits_before_it_changes_them(tmp_path: Path):
    async with Fleet(weights(1), tmp_path, source=HeldSource) as fleet:
        await fleet.manager.update_weights(1)
        fleet.set_weights(weights(2))
        rank, source = fleet.trainers[1].member, fleet.sources[1]
        source.may_copy.clear()
        released, changed = asyncio.Event(), []

        def change_weights() -> None:
            rank.await_copied()
            changed.append(source.may_copy.is_set())

        syncing = asyncio.create_task(fleet.manager.update_weights(2, released=released.set))
        await asyncio.wait_for(released.wait(), 60)
        changing = asyncio.create_task(asyncio.to_thread(change_weights))
        assert await asyncio.to_thread(soon, lambda: rank._copy.trainer_came_s is not None)
        await asyncio.sleep(0.2)
        assert not changed
        source.may_copy.set()
        await changing
        report = await syncing
        assert changed == [True]
        assert 0.1 < report.trainer_blocked_s < report.phase_s["publish"]
        assert_serves(fleet.replicas[0], 2)


async def test_a_trainer_that_does_not_change_its_weights_before_they_are_copied_is_not_blocked(tmp_path: Path):
    async with Fleet(weights(1), tmp_path) as fleet:
        report = await fleet.manager.update_weights(1, released=lambda: None)
        for trainer in fleet.trainers:
            trainer.member.await_copied()
        assert report.trainer_blocked_s == 0.0


async def test_a_copy_that_fails_lets_the_trainer_go_on_and_aborts_the_sync(tmp_path: Path):
    async with Fleet(weights(1), tmp_path) as fleet:
        await fleet.manager.update_weights(1)
        fleet.sources[0].copy = lambda *_: raising(TransportError("no memory"))()
        with pytest.raises(SyncAborted, match="no memory"):
            await fleet.manager.update_weights(2, released=fleet.trainers[0].member.await_copied)
        assert_serves(fleet.replicas[0], 1)


async def test_a_copy_that_has_not_begun_in_time_never_does_and_the_trainer_goes_on(tmp_path: Path):
    deadlines = {"publish_s": 3.0}
    async with Fleet(weights(1), tmp_path, source=HeldSource, deadlines=deadlines) as fleet:
        rank, may_go_on = fleet.trainers[0].member, threading.Event()
        await fleet.manager.update_weights(1)
        fleet.set_weights(weights(2))

        def released() -> None:
            rank.await_copied()
            may_go_on.set()

        fleet.trainers[0].before["publish"] = lambda: rank._thread.submit(may_go_on.wait, 60)  # as a transport might
        with pytest.raises(SyncAborted):
            await fleet.manager.update_weights(2, released=released)
        with pytest.raises(TransportError, match="had not begun"):
            await rank.published(2)
        fleet.trainers[0].before.clear()
        await sync(fleet, 3)
        assert_serves(fleet.replicas[0], 3)


async def test_a_copy_that_stalls_is_an_error_of_the_trainer_that_wants_to_change_its_weights(tmp_path: Path):
    deadlines = {"publish_s": 2.0}
    async with Fleet(weights(1), tmp_path, source=HeldSource, retries=0, deadlines=deadlines) as fleet:
        fleet.sources[0].may_copy.clear()
        failures: list[BaseException] = []

        def released() -> None:
            with pytest.raises(TransportTimeout, match="still being copied") as raised:
                fleet.trainers[0].member.await_copied()
            failures.append(raised.value)

        with pytest.raises(SyncAborted):
            await fleet.manager.update_weights(1, released=released)
        assert [(error.member, error.version, error.phase) for error in failures] == [("trainer-0", 1, "publish")]
        fleet.sources[0].may_copy.set()


async def test_what_fails_after_the_trainer_was_released_is_not_sent_again_with_its_changed_weights(tmp_path: Path):
    async with Fleet(weights(1), tmp_path, retries=3) as fleet:
        await fleet.manager.update_weights(1)
        fleet.trainers[0].before["publish"] = raising(TransportError("lost"), times=1)  # that one is tried again
        fleet.nodes[0].before["stage"] = raising(TransportError("lost"), times=1)
        fleet.set_weights(weights(2))
        releases: list[None] = []
        with pytest.raises(SyncAborted):
            await fleet.manager.update_weights(2, released=lambda: releases.append(None))
        assert len(releases) == 1
        assert_serves(fleet.replicas[0], 1)
        fleet.set_weights(weights(3))
        await fleet.manager.update_weights(3)
        assert_serves(fleet.replicas[0], 3)


# --- commit -----------------------------------------------------------------------------------------------------------


async def test_replicas_keep_their_version_until_the_boundary_however_long_the_new_one_is_there(
    tmp_path: Path,
):
    async with Fleet(weights(1), tmp_path) as fleet:
        await fleet.manager.update_weights(1)
        fleet.set_weights(weights(2))
        verified, boundary = asyncio.Event(), asyncio.Event()

        async def until_boundary() -> None:
            verified.set()
            await boundary.wait()

        syncing = asyncio.create_task(fleet.manager.update_weights(2, boundary=until_boundary))
        await verified.wait()
        await asyncio.sleep(0.1)
        assert fleet.nodes[0].calls[-1] == "verify"
        assert fleet.replicas[0].version == 1
        assert not fleet.replicas[0].paused
        boundary.set()
        report = await syncing
        assert fleet.replicas[0].version == 2
        assert report.phase_s["wait"] > 0.05
        assert sum(report.phase_s.values()) == pytest.approx(report.total_s)


async def test_cancelling_before_the_boundary_drops_what_was_staged(tmp_path: Path):
    async with Fleet(weights(1), tmp_path) as fleet:
        await fleet.manager.update_weights(1)
        verified = asyncio.Event()
        fleet.nodes[0].after["verify"] = verified.set
        syncing = asyncio.create_task(fleet.manager.update_weights(2, boundary=asyncio.Event().wait))
        await verified.wait()
        await asyncio.sleep(0.1)
        syncing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await syncing
        assert fleet.nodes[0].calls[-1] == "drop"
        assert (await fleet.manager.update_weights(3)).outcome == "committed"
        assert fleet.replicas[0].version == 3


async def test_a_boundary_that_must_not_be_passed_drops_what_was_staged(tmp_path: Path):
    async def never():
        raise TransportError("the trainer ranks died")

    async with Fleet(weights(1), tmp_path) as fleet:
        await fleet.manager.update_weights(1)
        with pytest.raises(SyncAborted, match="the trainer ranks died"):
            await fleet.manager.update_weights(2, boundary=never)
        assert fleet.nodes[0].calls[-1] == "drop"
        assert fleet.replicas[0].version == 1
        assert not fleet.replicas[0].paused
        assert (await fleet.manager.update_weights(3)).outcome == "committed"


@pytest.mark.parametrize("failing", [0, 1])
async def test_a_commit_that_fails_on_one_node_is_undone_on_the_other(failing: int, tmp_path: Path):
    async with Fleet(weights(0), tmp_path, nodes=2, replicas=2) as fleet:
        await sync(fleet, 1)
        fleet.nodes[failing].before["commit"] = raising(OSError("the file system is read-only"))
        abort = await aborted(fleet, 2)
        assert (abort.phase, abort.member) == ("commit", f"node-{failing}")
        assert [committed_version(path) for path in arenas_in(tmp_path)] == [1, 1]
        for replica in fleet.replicas:
            assert_serves(replica, 1)
            assert replica.log.count("pause") == 1
        fleet.nodes[failing].before.clear()
        await sync(fleet, 2)
        assert_all_serve(fleet, 2)


async def test_a_first_commit_that_fails_on_one_node_does_not_hinder_the_next_sync(tmp_path: Path):
    async with Fleet(weights(0), tmp_path, nodes=2, replicas=2) as fleet:
        fleet.nodes[1].before["commit"] = raising(OSError("read-only"))
        await aborted(fleet, 1)
        assert fleet.manager.version is None
        assert all(replica.version is None for replica in fleet.replicas)
        fleet.nodes[1].before.clear()
        await sync(fleet, 1)
        await sync(fleet, 2)
        assert_all_serve(fleet, 2)


# --- activate, resume -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("step", ["pause", "activate"])
@pytest.mark.parametrize("activation", ["together", "rolling"])
@pytest.mark.parametrize("action", [raising(RuntimeError("the engine is dead")), stalling], ids=["raises", "stalls"])
async def test_a_replica_that_cannot_activate_is_quarantined_and_the_others_go_on(
    step: str, activation: str, action: Callable[[], Any], tmp_path: Path
):
    config = {"deadlines": {"activate_s": DEADLINE_S}, "activation": activation}
    async with Fleet(weights(0), tmp_path, replicas=2, **config) as fleet:
        healthy, broken = fleet.replicas
        await sync(fleet, 1)
        broken.fail = at(step, action)
        resumed = broken.log.count("resume")
        report = await sync(fleet, 2)
        assert report.outcome == "committed"
        assert report.replicas_updated == ("replica-0",)
        assert report.replicas_quarantined == ("replica-1",)
        assert set(report.paused_s) == {"replica-0"}
        assert_serves(healthy, 2)
        assert fleet.manager.replicas == [healthy]
        assert fleet.manager.quarantined == [broken]
        await sync(fleet, 3)
        assert_serves(healthy, 3)
        assert broken.log.count("resume") == resumed, "it must not serve what nobody vouches for"
        broken.fail = lambda step: None
        await fleet.manager.add_replicas([broken])
        assert_serves(broken, 3)
        assert fleet.manager.quarantined == []


async def test_a_replica_that_does_not_resume_is_quarantined(tmp_path: Path):
    async with Fleet(weights(0), tmp_path, replicas=2) as fleet:
        fleet.replicas[0].fail = at("resume", raising(RuntimeError("no answer")))
        report = await sync(fleet, 1)
        assert report.replicas_quarantined == ("replica-0",)
        assert_serves(fleet.replicas[1], 1)
        fleet.replicas[0].fail = lambda step: None
        await fleet.manager.add_replicas([fleet.replicas[0]])
        report = await sync(fleet, 2)
        assert set(report.replicas_updated) == {"replica-0", "replica-1"}
        assert_serves(fleet.replicas[0], 2)


@pytest.mark.parametrize("activation", ["together", "rolling"])
async def test_a_version_that_no_replica_can_load_is_rolled_back_everywhere(activation: str, tmp_path: Path):
    async with Fleet(weights(0), tmp_path, nodes=2, replicas=2, activation=activation) as fleet:
        await sync(fleet, 1)
        for replica in fleet.replicas:
            replica.fail = at("activate", raising(ActivationError("a tensor is missing"), times=1))
        abort = await aborted(fleet, 2)
        assert isinstance(abort.__cause__, ActivationError)
        assert "a tensor is missing" in str(abort)
        assert [committed_version(path) for path in arenas_in(tmp_path)] == [1, 1]
        assert fleet.manager.version == 1
        assert fleet.manager.quarantined == []
        assert_all_serve(fleet, 1)
        await sync(fleet, 3)
        assert_all_serve(fleet, 3)


async def test_a_replica_that_cannot_even_return_to_the_previous_version_is_quarantined(tmp_path: Path):
    async with Fleet(weights(0), tmp_path, replicas=2) as fleet:
        await sync(fleet, 1)
        fleet.replicas[0].fail = at("activate", raising(ActivationError("cannot load"), times=1))
        fleet.replicas[1].fail = at("activate", raising(ActivationError("dead")))
        await aborted(fleet, 2)
        assert fleet.manager.replicas == [fleet.replicas[0]]
        assert fleet.manager.quarantined == [fleet.replicas[1]]
        assert_serves(fleet.replicas[0], 1)
        assert fleet.replicas[1].paused


async def test_a_first_version_that_no_replica_can_load_leaves_all_paused_until_they_are_added_again(tmp_path: Path):
    async with Fleet(weights(0), tmp_path, replicas=2) as fleet:
        for replica in fleet.replicas:
            replica.fail = at("activate", raising(ActivationError("cannot load"), times=1))
        assert "no replica is in service" in (await aborted(fleet, 1)).message
        assert fleet.manager.version is None
        assert fleet.manager.replicas == []
        assert all(replica.paused and "resume" not in replica.log for replica in fleet.replicas)
        await fleet.manager.add_replicas(fleet.manager.quarantined)
        await sync(fleet, 1)
        assert_all_serve(fleet, 1)


async def test_together_means_that_no_replica_loads_before_all_are_paused(tmp_path: Path):
    async with Fleet(weights(0), tmp_path, replicas=3) as fleet:
        paused_at_load: list[int] = []
        for replica in fleet.replicas:
            replica.fail = at("activate", lambda: paused_at_load.append(sum(r.paused for r in fleet.replicas)))
        await sync(fleet, 1)
        assert paused_at_load == [3, 3, 3]


async def test_rolling_means_that_one_replica_at_a_time_is_paused(tmp_path: Path):
    async with Fleet(weights(0), tmp_path, replicas=3, activation="rolling") as fleet:
        order: list[tuple[str, int]] = []
        for replica in fleet.replicas:
            replica.fail = at(
                "activate", lambda name=replica.name: order.append((name, sum(r.paused for r in fleet.replicas)))
            )
        await sync(fleet, 1)
        assert order == [("replica-0", 1), ("replica-1", 1), ("replica-2", 1)]


# --- cancelling -------------------------------------------------------------------------------------------------------


async def cancelled_at(fleet: Fleet, version: int, reached: asyncio.Event) -> None:
    """Start a sync, cancel it when `reached` is set."""
    task = asyncio.ensure_future(sync(fleet, version))
    await asyncio.wait_for(reached.wait(), 60)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


def pausing(reached: asyncio.Event, seconds: float = 60) -> Callable[[], Any]:
    def step() -> Any:
        reached.set()
        return asyncio.sleep(seconds)

    return step


@pytest.mark.parametrize(("kind", "method"), [("trainers", "publish"), ("nodes", "stage"), ("nodes", "verify")])
async def test_cancelling_a_sync_before_commit_drops_what_was_staged(kind: str, method: str, tmp_path: Path):
    async with Fleet(weights(0), tmp_path) as fleet:
        await sync(fleet, 1)
        reached = asyncio.Event()
        member = getattr(fleet, kind)[0]
        member.before[method] = pausing(reached)
        await cancelled_at(fleet, 2, reached)
        assert fleet.nodes[0].calls[-1] == "drop"
        assert fleet.manager.version == 1
        assert_serves(fleet.replicas[0], 1)
        member.before.clear()
        await sync(fleet, 3)
        assert_serves(fleet.replicas[0], 3)


async def test_cancelling_during_commit_returns_every_node_to_the_previous_version(tmp_path: Path):
    async with Fleet(weights(0), tmp_path, nodes=2, replicas=2) as fleet:
        await sync(fleet, 1)
        reached = asyncio.Event()
        fleet.nodes[1].before["commit"] = pausing(reached, 0.05)
        await cancelled_at(fleet, 2, reached)
        assert [committed_version(path) for path in arenas_in(tmp_path)] == [1, 1]
        assert fleet.manager.version == 1
        fleet.nodes[1].before.clear()
        await sync(fleet, 3)
        assert_all_serve(fleet, 3)


async def test_cancelling_during_activation_quarantines_the_replicas_that_do_not_serve_the_version_yet(tmp_path: Path):
    reports = tmp_path / "reports.jsonl"
    config = {"activation": "rolling", "deadlines": {"activate_s": DEADLINE_S}}
    async with Fleet(weights(0), tmp_path, replicas=3, report_path=reports, **config) as fleet:
        await sync(fleet, 1)
        reached = asyncio.Event()

        def stalls() -> Any:
            reached.set()
            return stalling()

        fleet.replicas[1].fail = at("activate", stalls)
        await cancelled_at(fleet, 2, reached)
        assert fleet.manager.version == 2
        assert fleet.manager.replicas == [fleet.replicas[0]]
        assert fleet.manager.quarantined == fleet.replicas[1:]
        assert_serves(fleet.replicas[0], 2)
        fleet.replicas[1].fail = lambda step: None
        await fleet.manager.add_replicas(fleet.manager.quarantined)
        assert_all_serve(fleet, 2)
    last = json.loads(reports.read_text().splitlines()[-1])
    assert (last["outcome"], last["error"]) == ("committed", "CancelledError")
    assert last["replicas_updated"] == ["replica-0"]


@pytest.mark.parametrize("step", ["pause", "activate", "resume"])
async def test_cancelling_leaves_no_replica_paused(step: str, tmp_path: Path):
    async with Fleet(weights(0), tmp_path, replicas=2) as fleet:
        await sync(fleet, 1)
        reached = asyncio.Event()
        fleet.replicas[1].fail = at(step, pausing(reached, 0.05))
        await cancelled_at(fleet, 2, reached)
        assert fleet.manager.quarantined == []
        assert_all_serve(fleet, 2)


# --- replicas that come and go ----------------------------------------------------------------------------------------


async def test_a_replica_that_comes_later_gets_the_version_from_its_node_and_the_trainer_is_not_asked(tmp_path: Path):
    async with Fleet(weights(0), tmp_path, nodes=2, replicas=2) as fleet:
        await sync(fleet, 1)
        calls = [list(trainer.calls) for trainer in fleet.trainers]
        fleet.set_weights(weights(2))
        late = RecordingReplica("late", node_index=1)
        await fleet.manager.add_replicas([late])
        assert_serves(late, 1)
        assert late.log == ["pause", "activate", "resume"]
        assert [trainer.calls for trainer in fleet.trainers] == calls
        report = await sync(fleet, 3)
        assert "late" in report.replicas_updated
        assert_serves(late, 3)


async def test_a_replica_does_not_get_a_version_that_was_damaged_after_its_commit(tmp_path: Path):
    async with Fleet(weights(0), tmp_path) as fleet:
        await sync(fleet, 1)
        (slot,) = [path.with_suffix("") for path in arenas_in(tmp_path)[0].glob("*.manifest")]
        flip_a_byte(slot)
        late = RecordingReplica("late")
        with pytest.raises(ActivationError) as raised:
            await fleet.manager.add_replicas([late])
        assert isinstance(raised.value.__cause__, IntegrityError)
        assert "w[32:64, 0:32]" in str(raised.value)
        assert raised.value.member == "late"
        assert late.log == []
        assert fleet.manager.quarantined == [late]
        await sync(fleet, 2)
        await fleet.manager.add_replicas([late])
        assert_serves(late, 2)


async def test_a_replica_in_service_that_cannot_catch_up_is_out_of_service(tmp_path: Path):
    async with Fleet(weights(0), tmp_path, replicas=2) as fleet:
        await sync(fleet, 1)
        fleet.replicas[0].fail = at("activate", raising(ActivationError("dead")))
        with pytest.raises(ActivationError, match="dead"):
            await fleet.manager.add_replicas(fleet.replicas)
        assert fleet.manager.replicas == [fleet.replicas[1]]
        assert fleet.manager.quarantined == [fleet.replicas[0]]


async def test_a_replica_that_was_removed_is_left_alone(tmp_path: Path):
    async with Fleet(weights(0), tmp_path, replicas=2) as fleet:
        await sync(fleet, 1)
        await fleet.manager.remove_replicas([fleet.replicas[0]])
        log = list(fleet.replicas[0].log)
        report = await sync(fleet, 2)
        assert report.replicas_updated == ("replica-1",)
        assert fleet.replicas[0].log == log


async def test_a_sync_without_replicas_commits_for_those_that_come_later(tmp_path: Path):
    async with Fleet(weights(0), tmp_path, replicas=0) as fleet:
        report = await sync(fleet, 1)
        assert report.outcome == "committed"
        late = RecordingReplica("late")
        await fleet.manager.add_replicas([late])
        assert_serves(late, 1)


async def test_control_calls_reach_every_replica_in_service(tmp_path: Path):
    async with Fleet(weights(0), tmp_path, replicas=2) as fleet:
        manager = fleet.manager
        for call in (
            manager.abort_replicas,
            manager.resume_generation_replicas,
            manager.sleep_replicas,
            manager.wake_up_replicas,
            manager.release_kv_cache_replicas,
            manager.resume_kv_cache_replicas,
        ):
            await call()
        for replica in fleet.replicas:
            assert replica.log == ["pause", "resume", "sleep", "wake_up", "release_kv_cache", "resume_kv_cache"]


# --- one slot, reports, preparation -----------------------------------------------------------------------------------


async def test_with_one_slot_replicas_keep_their_own_copy_through_a_failed_sync(tmp_path: Path):
    async with Fleet(weights(0), tmp_path, slots=1, retries=0) as fleet:
        await sync(fleet, 1)
        fleet.nodes[0].before["stage"] = raising(TransportError("cut"))
        await aborted(fleet, 2)
        assert committed_version(arenas_in(tmp_path)[0]) is None
        assert_serves(fleet.replicas[0], 1)
        fleet.nodes[0].before.clear()
        await sync(fleet, 3)
        assert_serves(fleet.replicas[0], 3)


async def test_with_one_slot_a_version_that_no_replica_can_load_cannot_be_rolled_back(tmp_path: Path):
    async with Fleet(weights(0), tmp_path, slots=1) as fleet:
        await sync(fleet, 1)
        fleet.replicas[0].fail = at("activate", raising(ActivationError("cannot load"), times=1))
        await aborted(fleet, 2)
        assert fleet.manager.replicas == []
        assert fleet.replicas[0].paused


async def test_every_sync_is_reported_the_aborted_ones_too(tmp_path: Path):
    path = tmp_path / "reports.jsonl"
    async with Fleet(weights(0), tmp_path, retries=0, report_path=path) as fleet:
        await sync(fleet, 1)
        fleet.nodes[0].before["stage"] = raising(TransportError("the wire is cut"))
        await aborted(fleet, 2)
        fleet.nodes[0].before.clear()
        await sync(fleet, 3)
    reports = [json.loads(line) for line in path.read_text().splitlines()]
    assert [(report["version"], report["outcome"]) for report in reports] == [
        (1, "committed"),
        (2, "aborted"),
        (3, "committed"),
    ]
    assert "the wire is cut" in reports[1]["error"]
    assert reports[1]["replicas_updated"] == []
    assert reports[1]["phase_s"]["publish"] > 0
    for report in reports:
        assert report["total_s"] == pytest.approx(sum(report["phase_s"].values()))


async def test_a_disk_that_is_full_takes_the_report_and_not_the_version(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    async with Fleet(weights(0), tmp_path, report_path=Path("/dev/full")) as fleet:
        await sync(fleet, 1)
        assert_serves(fleet.replicas[0], 1)
    assert "the report of version 1 is not in /dev/full: [Errno 28] No space left on device" in caplog.text


async def test_a_trainer_rank_with_another_model_is_named_before_anything_moves(tmp_path: Path):
    async with Fleet(weights(0), tmp_path, trainers=3) as fleet:
        fleet.sources[2].tensors["w"] = torch.zeros(65, 32)
        with pytest.raises(PlanError, match="trainer ranks 2 describe another model than rank 0"):
            await fleet.manager.update_weights(1)
        assert not arenas_in(tmp_path)
        await sync(fleet, 1)
        assert_serves(fleet.replicas[0], 1)


async def test_a_member_that_stalls_in_preparation_is_named(tmp_path: Path):
    async with Fleet(weights(0), tmp_path, trainers=2, deadlines={"prepare_s": DEADLINE_S}) as fleet:
        fleet.trainers[1].before["describe"] = stalling
        with pytest.raises(TransportTimeout, match=f"trainer-1 not done within {DEADLINE_S} s; done: trainer-0"):
            await fleet.manager.update_weights(1)


async def test_a_manager_without_members_is_a_configuration_error(tmp_path: Path):
    fleet = Fleet(weights(0), tmp_path, nodes=1)
    with pytest.raises(ConfigError, match="at least one trainer rank and one rollout node"):
        type(fleet.manager)(config=fleet.config, trainers=[], nodes=fleet.nodes)


async def test_closing_twice_is_harmless(tmp_path: Path):
    async with Fleet(weights(0), tmp_path) as fleet:
        await sync(fleet, 1)
        await fleet.manager.close()
    assert not arenas_in(tmp_path)


async def test_a_node_that_commits_after_its_deadline_returns_to_the_previous_version(tmp_path: Path):
    async with Fleet({"w": torch.zeros(8)}, tmp_path, nodes=2, deadlines={"commit_s": DEADLINE_S}, retries=0) as fleet:
        await fleet.manager.update_weights(1)
        arena = fleet.nodes[1].member._arena
        in_time, done, given_up = arena.commit, [], threading.Event()

        def too_late(*arguments: Any) -> None:
            stalling.calls += 1
            assert given_up.wait(60)
            done.append(in_time(*arguments))

        def give_up() -> None:
            stalling.calls -= 1
            given_up.set()

        arena.commit = too_late
        fleet.nodes[1].before["rollback"] = give_up
        with pytest.raises(SyncAborted) as caught:
            await fleet.manager.update_weights(2)
        assert (caught.value.phase, caught.value.member) == ("commit", "node-1")
        assert done, "the late commit has happened"
        assert [committed_version(path) for path in arenas_in(tmp_path)] == [1, 1]
