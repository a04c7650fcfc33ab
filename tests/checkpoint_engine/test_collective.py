"""Broadcasts between members that fail, stall, disagree: what an operator reads, and that the next sync works."""

from __future__ import annotations

import asyncio
import threading
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.checkpoint_engine.fakes import Fleet, raising, soon
from verl.checkpoint_engine.backends import collective
from verl.checkpoint_engine.errors import BackendUnavailable, ConfigError, SyncAborted, TransportError, TransportTimeout
from verl.checkpoint_engine.links import owner_groups, rendezvous
from verl.checkpoint_engine.links.network import own_address
from verl.checkpoint_engine.plan.topology import MAX_LANES
from verl.checkpoint_engine.registry import resolve_backend

TENSORS = {"w": torch.randn(2000, 900), "norm": torch.randn(7)}


def fleet_of(tmp_path: Path, **config: Any) -> Fleet:
    return Fleet(TENSORS, tmp_path, **{"trainers": 2, "nodes": 2, "replicas": 2, "backend": "gloo", **config})


def given_up_threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name == "weight-sync-given-up"]


def engine_of(member: Any) -> Any:
    return member.member._engine


@pytest.fixture
def members_are_sooner(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their deadlines are long before those of the manager, and nobody is quiet who has no core for a second."""
    for module in (collective, owner_groups):
        monkeypatch.setattr(module, "OWN_SHARE", 0.25)
    monkeypatch.setattr(rendezvous, "QUIET_S", 3.0)


@pytest.mark.usefixtures("members_are_sooner")
async def test_a_sender_that_does_not_come_is_named_when_the_deadline_has_passed(tmp_path: Path):
    async with fleet_of(tmp_path, retries=0, deadlines={"stage_s": 40.0}) as fleet:
        await fleet.manager.update_weights(1)
        fleet.trainers[1].before["serve"] = asyncio.Event().wait
        with pytest.raises(SyncAborted) as raised:
            await fleet.manager.update_weights(2)
        assert isinstance(raised.value.__cause__, TransportTimeout)
        assert (raised.value.version, raised.value.phase) == (2, "stage")
        assert "not done within 10.0 s" in str(raised.value)  # of trainer-1, or of another, which waits for the nodes
        assert str(raised.value).endswith("no sign of life from trainer-1")
        assert [replica.version for replica in fleet.replicas] == [1, 1]
        fleet.trainers[1].before.clear()
        await fleet.manager.update_weights(3)
        assert [replica.version for replica in fleet.replicas] == [3, 3]
    assert soon(lambda: not given_up_threads())


@pytest.mark.usefixtures("members_are_sooner")
async def test_a_node_that_does_not_take_part_is_named_when_the_deadline_has_passed(tmp_path: Path):
    async with fleet_of(tmp_path, retries=0, deadlines={"stage_s": 40.0}) as fleet:
        fleet.nodes[1].before["stage"] = lambda: asyncio.sleep(300)
        with pytest.raises(SyncAborted) as raised:
            await fleet.manager.update_weights(1)
        assert isinstance(raised.value.__cause__, TransportTimeout)
        assert str(raised.value).endswith("no sign of life from node-1")
        fleet.nodes[1].before.clear()
        await fleet.manager.update_weights(2)


async def test_the_others_are_free_at_once_when_one_member_fails(tmp_path: Path):
    async with fleet_of(tmp_path, retries=0, deadlines={"stage_s": 3600.0}) as fleet:
        await fleet.manager.update_weights(1)

        async def die() -> None:
            await asyncio.sleep(0.2)  # the others are in the middle of it
            raise TransportError("its process is gone", member="trainer-1")

        fleet.trainers[1].before["serve"] = die
        with pytest.raises(SyncAborted, match="its process is gone"):
            await fleet.manager.update_weights(2)
        fleet.trainers[1].before.clear()
        await fleet.manager.update_weights(3)
        assert [replica.version for replica in fleet.replicas] == [3, 3]


async def test_another_attempt_of_the_same_sync_connects_anew(tmp_path: Path):
    async with fleet_of(tmp_path, retries=1) as fleet:
        fleet.trainers[0].before["serve"] = raising(TransportError("once"), times=1)
        report = await fleet.manager.update_weights(1)
        assert report.retries == 1
        assert all(torch.equal(replica.weights["w"], TENSORS["w"]) for replica in fleet.replicas)
        assert fleet.nodes[0].calls.count("connect") == 2


async def test_with_many_owners_a_node_has_two_threads_for_each_at_most_and_few_devices(tmp_path: Path):
    of_others = native_threads("gloo_tcp_loop") | native_threads("pt_gloo_runloop")
    async with fleet_of(tmp_path, trainers=12, retries=0) as fleet:
        for version in range(2):
            await fleet.manager.update_weights(version)
            assert all(torch.equal(replica.weights["w"], TENSORS["w"]) for replica in fleet.replicas)
        # One per pair: an owner has one, the first node two of each owner, the last node one.
        assert len(native_threads("pt_gloo_runloop") - of_others) == 12 * (1 + 2 + 1)
        assert len(native_threads("gloo_tcp_loop") - of_others) == 12 * 1 + 2 * MAX_LANES  # one per device
    assert soon(lambda: not native_threads("gloo_tcp_loop") - of_others)


def native_threads(name: str) -> set[str]:
    """The numbers of this process's threads of that name. Groups that earlier tests have left behind have some, too."""
    found = set()
    for path in Path("/proc/self/task").glob("*/comm"):
        with suppress(OSError):  # it may end at this moment
            if path.read_text().strip() == name:
                found.add(path.parent.name)
    return found


async def test_a_stage_that_is_given_up_before_it_begins_ends_at_once(tmp_path: Path):
    async with fleet_of(tmp_path) as fleet:
        await fleet.manager.update_weights(1)
        node, engine = fleet.nodes[0].member, engine_of(fleet.nodes[0])
        await node.begin(2)
        engine.interrupt()
        with pytest.raises(TransportError, match="given up by the manager"):
            engine.receive_weights(2, node._open_arena)


async def test_a_flipped_byte_is_sent_again_over_the_same_connections(tmp_path: Path):
    async with fleet_of(tmp_path, retries=1) as fleet:
        flips = [0]

        def flip_once() -> None:
            if flips:
                engine_of(fleet.trainers[0])._region.bytes[flips.pop()] ^= 1

        fleet.trainers[0].before["serve"] = flip_once
        report = await fleet.manager.update_weights(1)
        assert report.retries == 1
        assert fleet.nodes[0].calls.count("connect") == 1
        assert all(torch.equal(replica.weights["w"], TENSORS["w"]) for replica in fleet.replicas)


async def test_weights_of_an_older_version_are_refused_before_they_land(tmp_path: Path):
    async with fleet_of(tmp_path, retries=0) as fleet:
        await fleet.manager.update_weights(1)
        stale = fleet.trainers[1]
        stale.member.serve = lambda version: TrainerOf(stale.member).serve(1)
        engine = engine_of(stale)
        publish = engine.send_weights

        def forget_to_publish(version: int, source: Any, slots: Any) -> Any:
            publication = publish(version, source, slots)
            engine._published = 1
            return publication

        engine.send_weights = forget_to_publish
        with pytest.raises(SyncAborted, match="trainer-1 sends version 1 where version 2 is expected"):
            await fleet.manager.update_weights(2)
        assert [replica.version for replica in fleet.replicas] == [1, 1]


class TrainerOf:
    """A trainer rank that still believes in its old version."""

    def __init__(self, member: Any) -> None:
        self._member = member

    async def serve(self, version: int) -> int:
        return await type(self._member).serve(self._member, version)


async def test_a_rank_serves_nothing_but_what_it_has_published(tmp_path: Path):
    async with fleet_of(tmp_path) as fleet:
        await fleet.manager.update_weights(1)
        with pytest.raises(TransportError, match="version 7 was requested, but version 1 is published"):
            await fleet.trainers[0].serve(7)


@pytest.mark.usefixtures("members_are_sooner")
async def test_a_member_that_does_not_connect_is_named(tmp_path: Path):
    async with fleet_of(tmp_path, deadlines={"prepare_s": 40.0}) as fleet:
        fleet.nodes[1].before["connect"] = lambda: asyncio.sleep(300)
        with pytest.raises(TransportTimeout) as raised:
            await fleet.manager.update_weights(1)
        assert "node-1 not connected within 10.0 s; done: trainer-0, trainer-1, node-0" in str(raised.value)
        fleet.nodes[1].before.clear()
        await fleet.manager.update_weights(1)


async def test_the_default_group_of_the_trainer_is_not_touched(tmp_path: Path):
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        groups = dict(dist.distributed_c10d._world.pg_map)
        async with fleet_of(tmp_path) as fleet:
            await fleet.manager.update_weights(1)
            assert dict(dist.distributed_c10d._world.pg_map) == groups
        dist.all_reduce(torch.ones(1))
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize(
    ("backend", "extra"), [("nccl", r"verl-sync\[cuda\]"), ("hccl", r"verl-sync\[npu\]")], ids=["nccl", "hccl"]
)
def test_a_missing_device_is_named_with_the_extra(backend: str, extra: str, tmp_path: Path):
    if backend == "nccl" and torch.cuda.is_available():
        pytest.skip("there is a CUDA device here")
    with pytest.raises(BackendUnavailable, match=f"checkpoint_engine.backend={backend} needs .*{extra}"):
        fleet_of(tmp_path, backend=backend)


def test_an_interface_that_does_not_exist_gets_the_list_of_those_that_do(tmp_path: Path):
    with pytest.raises(BackendUnavailable, match=r"network interface 'ib7' has no IPv4 address on .*; there are: .*lo"):
        fleet_of(tmp_path, engine_kwargs={"gloo": {"interface": "ib7"}})
    assert own_address("lo") == "127.0.0.1"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"bucket_megabytes": 0},
            r"checkpoint_engine\.engine_kwargs\.gloo\.bucket_megabytes must be at least 1, not 0",
        ),
        ({"in_flight": 0}, "in_flight must be at least 1, not 0"),
        ({"bucket_megabyte": 1}, "Did you mean 'bucket_megabytes'"),
    ],
)
def test_wrong_options_are_refused_on_the_driver(options: dict[str, Any], message: str):
    from verl.checkpoint_engine.config import CheckpointEngineConfig

    with pytest.raises(ConfigError, match=message):
        resolve_backend(CheckpointEngineConfig.from_mapping({"backend": "gloo", "engine_kwargs": {"gloo": options}}))
