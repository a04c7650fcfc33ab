"""Deltas that are broadcast: all nodes get them or none, and what does not come out right goes whole next time."""

from __future__ import annotations

import asyncio
import ctypes
import logging
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.checkpoint_engine.fakes import ColumnShardedSource, Fleet, raising
from tests.checkpoint_engine.member_processes import SpoiledCommunicator
from tests.checkpoint_engine.test_deltas import MODEL, Story, delta_of, nudged, synced
from tests.checkpoint_engine.test_one_sided import engine_of
from verl.checkpoint_engine.errors import IntegrityError, SyncAborted, TransportError
from verl.checkpoint_engine.plan.delta_choice import Rates


def fleet_of(tmp_path: Path, **config: Any) -> Fleet:
    options = {"backend": "gloo", "delta": "always", "block_kilobytes": 4, "update_weights_bucket_megabytes": 1}
    return Fleet(MODEL, tmp_path, **{**options, "retries": 0, "nodes": 2, "replicas": 2, **config})


async def test_an_owner_without_deltas_sends_everything_beside_one_that_has_some(tmp_path: Path) -> None:
    async with fleet_of(tmp_path) as fleet:
        await synced(fleet, 0, MODEL)
        mixed = {name: tensor.clone() for name, tensor in nudged(MODEL, 0.02, 1).items()}
        mixed["w"][:320] = torch.randn(320, 200).bfloat16()  # of trainer-0: there is no room for that as a delta
        report = await synced(fleet, 1, mixed)
        assert delta_of(report).way == "mixed"
        assert delta_of(await synced(fleet, 2, nudged(mixed, 0.02, 2))).way == "delta"


async def test_one_slot_is_changed_in_place(tmp_path: Path) -> None:
    async with fleet_of(tmp_path, slots=1, source=ColumnShardedSource) as fleet:
        tensors = MODEL
        await synced(fleet, 0, tensors)
        for version in range(1, 4):
            tensors = nudged(tensors, 0.02, version)
            assert delta_of(await synced(fleet, version, tensors)).way == "delta"


async def test_nobody_makes_deltas_while_a_node_cannot_use_them(tmp_path: Path) -> None:
    async with fleet_of(tmp_path) as fleet:
        await synced(fleet, 0, MODEL)
        fleet.nodes[1].member._arena.base = lambda: None
        report = await synced(fleet, 1, nudged(MODEL, 0.02, 1))
        assert (report.retries, delta_of(report).way, delta_of(report).encode_s) == (0, "full", 0.0)
        del fleet.nodes[1].member._arena.base
        assert delta_of(await synced(fleet, 2, nudged(MODEL, 0.02, 2))).way == "delta"


async def test_a_node_whose_base_is_another_one_says_so_and_everything_is_sent(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with fleet_of(tmp_path, retries=1) as fleet:
        await synced(fleet, 0, MODEL)
        slot = fleet.nodes[1].member._arena._current
        slot.manifest = type(slot.manifest)(0, slot.manifest.plan, slot.manifest.digests + 1)
        with caplog.at_level(logging.WARNING):
            report = await synced(fleet, 1, nudged(MODEL, 0.02, 1))
        assert (report.retries, delta_of(report).way) == (1, "full")
        assert "node-1] it does not hold the version from which the deltas of trainer-0, trainer-1 lead" in caplog.text
        assert delta_of(await synced(fleet, 2, nudged(MODEL, 0.02, 2))).way == "delta"


async def test_auto_sends_everything_until_all_have_the_code_and_then_what_changed(tmp_path: Path) -> None:
    async with fleet_of(
        tmp_path, delta="auto", hosts=("aa", "bb"), engine_kwargs={"gloo": {"interface": "lo"}}
    ) as fleet:
        await synced(fleet, 0, MODEL)
        fleet.manager._deltas._rates = Rates(link=1e5)  # so slow that looking pays
        for version in range(1, 100):
            report = await synced(fleet, version, nudged(MODEL, 0.02, version))
            assert report.retries == 0
            if delta_of(report).way == "delta":
                break
            await asyncio.sleep(0.2)
        assert delta_of(report).predicted_delta_s < delta_of(report).predicted_full_s


def damage_base(fleet: Fleet) -> None:
    with fleet.nodes[0].member._arena._current.path.open("r+b") as slot:
        slot.seek(5000)
        slot.write(b"damage")


async def test_a_base_that_was_damaged_is_noticed_and_everything_is_sent(tmp_path: Path) -> None:
    async with fleet_of(tmp_path, retries=1) as fleet:
        await synced(fleet, 0, MODEL)
        damage_base(fleet)
        report = await synced(fleet, 1, nudged(MODEL, 0.02, 1))
        assert (report.retries, delta_of(report).way) == (1, "full")
        assert fleet.nodes[0].calls.count("connect") == 1


async def test_without_another_try_the_sync_is_aborted_and_the_next_one_sends_everything(tmp_path: Path) -> None:
    async with fleet_of(tmp_path) as fleet:
        await synced(fleet, 0, MODEL)
        damage_base(fleet)
        fleet.set_weights(nudged(MODEL, 0.02, 1))
        with pytest.raises(SyncAborted) as raised:
            await fleet.manager.update_weights(1)
        assert isinstance(raised.value.__cause__, IntegrityError)
        assert [replica.version for replica in fleet.replicas] == [0, 0]
        assert delta_of(await synced(fleet, 2, nudged(MODEL, 0.02, 2))).way == "full"


class Flip:
    """Once, a bit at `place` of the first deltas that land."""

    def __init__(self, place: int) -> None:
        self._left = [place]

    def landed(self, address: int, nbytes: int) -> None:
        if nbytes > 1000 and self._left:
            ctypes.c_uint8.from_address(address + self._left.pop()).value ^= 1


@pytest.mark.parametrize("place", [8, 40, 220], ids=["head", "table", "streams"])
async def test_a_bit_that_flips_in_deltas_on_the_way_is_noticed_and_everything_is_sent(
    place: int, tmp_path: Path
) -> None:
    async with fleet_of(tmp_path, retries=1) as fleet:
        await synced(fleet, 0, MODEL)
        groups = engine_of(fleet.nodes[1])._groups
        groups._communicator = SpoiledCommunicator(groups._communicator, Flip(place))
        report = await synced(fleet, 1, nudged(MODEL, 0.02, 1))
        assert (report.retries, delta_of(report).way) == (1, "full")


async def test_a_sync_that_fails_on_the_way_is_tried_again_over_new_connections(tmp_path: Path) -> None:
    async with fleet_of(tmp_path, retries=1) as fleet:
        await synced(fleet, 0, MODEL)
        fleet.nodes[0].before["stage"] = raising(TransportError("nobody knows why", phase="stage"), times=1)
        report = await synced(fleet, 1, nudged(MODEL, 0.02, 1))
        assert (report.retries, delta_of(report).way) == (1, "full")
        assert delta_of(await synced(fleet, 2, nudged(MODEL, 0.02, 2))).way == "delta"


@pytest.mark.parametrize("seed", range(2))
async def test_whatever_happens_in_whatever_order_nodes_hold_what_was_committed(seed: int, tmp_path: Path) -> None:
    async with fleet_of(tmp_path, replicas=1) as fleet:
        assert await Story(fleet, tmp_path, seed, joins=False).run(10) > 0
