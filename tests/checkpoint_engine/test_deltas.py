"""Syncs that move what changed: bit-equal on every backend and along every topology, and verified as any other."""

from __future__ import annotations

import ctypes
import random
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch

from tests.checkpoint_engine.backends import EXAMPLE, using
from tests.checkpoint_engine.fakes import (
    ColumnShardedSource,
    Fleet,
    RowShardedSource,
    Through,
    assert_bit_equal,
    raising,
)
from tests.checkpoint_engine.test_contract import CASES, tensors_of
from tests.checkpoint_engine.test_one_sided import engine_of
from verl.checkpoint_engine.config import CheckpointEngineConfig
from verl.checkpoint_engine.errors import ConfigError, SyncAborted, TransportError
from verl.checkpoint_engine.memory.committed import read_committed
from verl.checkpoint_engine.plan.delta_choice import CHANGE_LIMITS, DeltaReport
from verl.checkpoint_engine.plan.types import SyncReport
from verl.checkpoint_engine.registry import resolve_backend
from verl.checkpoint_engine.sync.rollout_node import RolloutNode

QUICK = ("tcp", "nixl", EXAMPLE)
OPTIONS = {"delta": "always", "block_kilobytes": 4, "update_weights_bucket_megabytes": 1, "retries": 0}


def nudged(tensors: Mapping[str, torch.Tensor], fraction: float, seed: int) -> dict[str, torch.Tensor]:
    """`tensors` with about that fraction of the bit patterns one up or down."""
    generator = torch.Generator().manual_seed(seed)
    found = {}
    for name, tensor in tensors.items():
        changed = tensor.contiguous().clone()
        integer = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()]
        if tensor.dtype != torch.bool:
            bits = changed.reshape(-1).view(integer)
            where = torch.rand(bits.shape, generator=generator) < fraction
            bits += where * (2 * torch.randint(0, 2, bits.shape, generator=generator) - 1).to(integer)
        found[name] = changed
    return found


def delta_of(report: SyncReport) -> DeltaReport:
    assert report.delta is not None
    return report.delta


async def synced(fleet: Fleet, version: int, tensors: Mapping[str, torch.Tensor]) -> SyncReport:
    fleet.set_weights(tensors)
    report = await fleet.manager.update_weights(version)
    for replica in fleet.replicas:
        assert_bit_equal(replica, version, tensors)
    return report


@pytest.mark.parametrize("case", list(CASES))
async def test_every_kind_of_model_arrives_bit_equal(case: str, tmp_path: Path) -> None:
    async with Fleet(tensors_of(case, 0), tmp_path, trainers=3, replicas=2, backend="tcp", **OPTIONS) as fleet:
        tensors = tensors_of(case, 0)
        await synced(fleet, 0, tensors)
        for version in range(1, 4):
            tensors = nudged(tensors, 0.02, version)
            report = await synced(fleet, version, tensors)
            assert report.delta is not None
            assert report.delta.pieces_whole == 0
            assert report.delta.way == "delta"
        await synced(fleet, 4, tensors_of(case, 4))  # everything is another


@pytest.mark.parametrize("source", [RowShardedSource, ColumnShardedSource])
@pytest.mark.parametrize("backend", [using(backend) for backend in (*QUICK, "gloo", "mooncake", "kimi_ckpt_engine")])
async def test_every_backend_moves_little_for_few_changes(
    backend: str, source: type[RowShardedSource], tmp_path: Path
) -> None:
    tensors = {"w": torch.randn(256, 1024).bfloat16(), "frozen": torch.randn(64, 512).bfloat16(), "n": torch.zeros(0)}
    options = OPTIONS | {"block_kilobytes": 64}
    async with Fleet(tensors, tmp_path, trainers=2, nodes=3, backend=backend, source=source, **options) as fleet:
        full = await synced(fleet, 0, tensors)
        for version in range(1, 4):
            tensors = nudged(tensors, 0.01, version) | {"frozen": tensors["frozen"]}
            report = await synced(fleet, version, tensors)
            assert report.delta is not None
            assert (report.delta.way, report.delta.pieces_whole) == ("delta", 0)
            assert report.delta.tensors_unchanged >= 1
            assert report.delta.most_changed[0][0] == "w"
            assert report.nbytes_moved < full.nbytes_moved / 2  # owners copy in full; nodes get a hundredth


@pytest.mark.parametrize("topology", ["direct", "chain", "tree", "p2p_broadcast"])
async def test_nodes_pass_deltas_on(topology: str, tmp_path: Path) -> None:
    tensors = tensors_of("large and small in turn", 0)
    async with Fleet(tensors, tmp_path, trainers=2, nodes=4, backend="tcp", topology=topology, **OPTIONS) as fleet:
        await synced(fleet, 0, tensors)
        for version in range(1, 4):
            tensors = nudged(tensors, 0.01, version)
            report = await synced(fleet, version, tensors)
            assert report.delta is not None
            assert (report.delta.way, report.delta.pieces_whole) == ("delta", 0)


MODEL = {"w": torch.randn(640, 200).bfloat16(), "norm": torch.randn(33)}


def fleet_of(tmp_path: Path, **config: object) -> Fleet:
    return Fleet(MODEL, tmp_path, **{"backend": "memory-wire", **OPTIONS, **config})


async def test_a_sync_that_is_tried_again_moves_the_same_deltas(tmp_path: Path) -> None:
    async with fleet_of(tmp_path, retries=1) as fleet:
        await synced(fleet, 0, MODEL)
        fleet.nodes[0].before["stage"] = raising(TransportError("nobody knows why", phase="stage"), times=1)
        report = await synced(fleet, 1, nudged(MODEL, 0.02, 1))
        assert (report.retries, delta_of(report).way, delta_of(report).pieces_whole) == (1, "delta", 0)


async def test_after_a_sync_that_was_aborted_everything_is_sent(tmp_path: Path) -> None:
    async with fleet_of(tmp_path) as fleet:
        first = nudged(MODEL, 0.02, 1)
        await synced(fleet, 0, MODEL)
        fleet.nodes[0].before["verify"] = raising(TransportError("gone", phase="verify"))
        fleet.set_weights(first)
        with pytest.raises(SyncAborted):
            await fleet.manager.update_weights(1)
        fleet.nodes[0].before.clear()
        second = nudged(first, 0.02, 2)
        assert delta_of(await synced(fleet, 2, second)).way == "full"
        assert delta_of(await synced(fleet, 3, nudged(second, 0.02, 3))).way == "delta"


async def test_a_node_that_joins_late_gets_deltas_from_then_on(tmp_path: Path) -> None:
    async with fleet_of(tmp_path) as fleet:
        first = nudged(MODEL, 0.02, 1)
        await synced(fleet, 0, MODEL)
        await synced(fleet, 1, first)
        late = RolloutNode(1, fleet.config, job="test", shm_dir=tmp_path, host="a")
        await fleet.manager.add_nodes([late])
        report = await synced(fleet, 2, nudged(first, 0.02, 2))  # everybody is connected anew
        assert delta_of(report).pieces_whole == 0
        assert delta_of(report).way == "delta"


@pytest.mark.parametrize("topology", ["direct", "chain"])
async def test_a_node_with_another_base_gets_the_version_whole(topology: str, tmp_path: Path) -> None:
    async with fleet_of(tmp_path, nodes=3, topology=topology) as fleet:
        await synced(fleet, 0, MODEL)
        arena = fleet.nodes[1].member._arena
        slot = arena._current
        slot.manifest = type(slot.manifest)(0, slot.manifest.plan, slot.manifest.digests + 1)
        report = await synced(fleet, 1, nudged(MODEL, 0.02, 1))
        assert delta_of(report).way == "delta"
        assert delta_of(report).pieces_whole == len(slot.manifest.plan)


async def test_one_slot_is_changed_in_place(tmp_path: Path) -> None:
    async with fleet_of(tmp_path, slots=1) as fleet:
        tensors = MODEL
        await synced(fleet, 0, tensors)
        for version in range(1, 4):
            tensors = nudged(tensors, 0.02, version)
            report = delta_of(await synced(fleet, version, tensors))
            assert (report.way, report.pieces_whole) == ("delta", 0)


async def test_a_base_that_was_damaged_is_noticed_and_its_piece_fetched_whole(tmp_path: Path) -> None:
    async with fleet_of(tmp_path) as fleet:
        await synced(fleet, 0, MODEL)
        arena = fleet.nodes[0].member._arena
        with arena._current.path.open("r+b") as slot:
            slot.seek(5000)
            slot.write(b"damage")
        report = await synced(fleet, 1, nudged(MODEL, 0.02, 1))
        assert (delta_of(report).way, report.pieces_repaired) == ("delta", 1)


@pytest.mark.parametrize("place", ["head", "table", "streams"])
async def test_a_bit_that_flips_in_deltas_on_the_way_is_noticed(place: str, tmp_path: Path) -> None:
    async with fleet_of(tmp_path) as fleet:
        await synced(fleet, 0, MODEL)
        node = engine_of(fleet.nodes[0])
        flips = [{"head": 8, "table": 40, "streams": 220}[place]]

        def flip_once(target: int, nbytes: int) -> None:
            if nbytes > 1000 and flips:
                ctypes.c_uint8.from_address(target + flips.pop()).value ^= 1

        node._wires.first.after_read = flip_once
        report = await synced(fleet, 1, nudged(MODEL, 0.02, 1))
        assert (report.retries, flips) == (0, [])
        whole = report.pieces_repaired + delta_of(report).pieces_whole
        pieces = len(fleet.nodes[0].member._plan.pieces_of(0))
        assert whole == (1 if place == "streams" else pieces)


async def test_frozen_tensors_cost_nothing_and_are_counted(tmp_path: Path) -> None:
    async with fleet_of(tmp_path) as fleet:
        await synced(fleet, 0, MODEL)
        report = delta_of(await synced(fleet, 1, MODEL))
        assert (report.tensors_unchanged, report.changed_fraction, report.most_changed) == (2, 0.0, [])
        assert dict(zip(CHANGE_LIMITS, report.tensors_by_change, strict=True)) == dict.fromkeys(CHANGE_LIMITS, 0) | {
            1e-6: 2
        }
        report = delta_of(await synced(fleet, 2, nudged(MODEL, 0.02, 2) | {"norm": MODEL["norm"]}))
        counted = {limit: n for limit, n in zip(CHANGE_LIMITS, report.tensors_by_change, strict=True) if n}
        assert counted == {1e-6: 1, 3e-2: 1}


async def test_on_one_host_nobody_looks_what_changed(tmp_path: Path) -> None:
    async with fleet_of(tmp_path, delta="auto") as fleet:
        for version in range(3):
            assert (await synced(fleet, version, nudged(MODEL, 0.02, version))).delta is None


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"backend": "naive", "delta": "always"}, "delta=always is impossible with checkpoint_engine.backend=naive"),
        ({"backend": "tcp", "delta": "always", "verify": False}, "needs checkpoint_engine.verify=true"),
    ],
)
def test_deltas_that_are_impossible_are_refused_on_the_driver(values: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        resolve_backend(CheckpointEngineConfig.from_mapping(values))


class Story:
    """Any order of what can happen to a fleet; after everything, whoever serves has exactly what was committed last."""

    def __init__(self, fleet: Fleet, shm_dir: Path, seed: int, *, joins: bool = True) -> None:
        self._fleet, self._shm_dir, self._random, self._seed = fleet, shm_dir, random.Random(seed), seed
        self._trained, self._served = dict(MODEL), dict(MODEL)
        self._version = self._joined = self._deltas = 0
        self._joins = joins

    async def run(self, events: int) -> int:
        """How many syncs moved deltas."""
        await synced(self._fleet, 0, MODEL)
        happens = [self.little_changes, self.little_changes, self.much_changes, self.is_aborted, self.is_rolled_back]
        happens += [self.is_tried_again, *([self.a_node_joins] if self._joins else [])]
        for _ in range(events):
            self._version += 1
            self._trained = nudged(self._trained, self._random.choice([0.0, 0.001, 0.05]), self._version)
            await self._random.choice(happens)()
            for node in self._fleet.nodes:
                held = dict(read_committed(str(node.member._arena.directory), self._fleet.manager.version))
                assert all(torch.equal(held[name], tensor) for name, tensor in self._served.items())
        return self._deltas

    async def little_changes(self) -> None:
        report = await synced(self._fleet, self._version, self._trained)
        self._deltas += report.delta is not None and report.delta.way == "delta"
        self._served = self._trained

    async def much_changes(self) -> None:
        self._trained = nudged(self._trained, 1.0, self._version)
        await self.little_changes()

    async def is_aborted(self) -> None:
        await self._fails(self._fleet.nodes[0], "verify")

    async def is_tried_again(self) -> None:
        await self._fails(self._fleet.nodes[0], "stage")
        await self.little_changes()  # the same version again

    async def _fails(self, node: Through, phase: str) -> None:
        def fail() -> None:
            raise TransportError("nobody knows why", phase=phase)

        node.before[phase] = fail
        self._fleet.set_weights(self._trained)
        with pytest.raises(SyncAborted):
            await self._fleet.manager.update_weights(self._version)
        node.before.clear()

    async def is_rolled_back(self) -> None:
        replica = self._fleet.replicas[0]

        def fail(step: str) -> None:
            if step == "activate" and not failed:
                failed.append(step)
                raise RuntimeError("no version for me")

        failed: list[str] = []
        replica.fail = fail
        self._fleet.set_weights(self._trained)
        with pytest.raises(SyncAborted):
            await self._fleet.manager.update_weights(self._version)
        replica.fail = lambda step: None

    async def a_node_joins(self) -> None:
        await self.little_changes()
        self._joined += 1
        node = Through(
            RolloutNode(self._joined, self._fleet.config, job=f"story-{self._seed}", shm_dir=self._shm_dir, host="a")
        )
        await self._fleet.manager.add_nodes([node])
        self._fleet.nodes.append(node)


@pytest.mark.parametrize("topology", ["direct", "chain"])
@pytest.mark.parametrize("seed", range(4))
async def test_whatever_happens_in_whatever_order_nodes_hold_what_was_committed(
    seed: int, topology: str, tmp_path: Path
) -> None:
    async with fleet_of(tmp_path, topology=topology) as fleet:
        assert await Story(fleet, tmp_path, seed).run(12) > 0


WITHOUT_NUMBA = """
import logging, sys, threading
sys.modules["numba"] = None
logging.basicConfig()
from verl.checkpoint_engine.errors import BackendUnavailable
from verl.checkpoint_engine.memory.delta import begin_to_warm_up, is_warm, warm_up
for _ in range(2):
    begin_to_warm_up()
for thread in threading.enumerate():
    if thread.name == "weight-sync-warm-up":
        thread.join()
assert not is_warm()
try:
    warm_up()
except BackendUnavailable as exc:
    print(exc)
"""


def test_without_numba_versions_are_moved_whole_and_asking_for_deltas_says_why() -> None:
    run = subprocess.run([sys.executable, "-c", WITHOUT_NUMBA], capture_output=True, text=True, timeout=300, check=True)
    assert run.stderr.count("versions are moved whole") == 1
    assert "checkpoint_engine.delta: numba cannot compile it" in run.stdout
