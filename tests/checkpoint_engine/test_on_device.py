"""Weights that lie on an accelerator: published, pinned, loaded and compared there. The CPU is one where it can be.

Needs neither Ray nor an engine: `scripts/gpu_check.sh` runs what is marked `gpu` on a machine that has little else.
"""

from __future__ import annotations

import logging
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest
import torch

from verl.checkpoint_engine.links.deltas import OwnerDeltas, fitting
from verl.checkpoint_engine.memory import device_base
from verl.checkpoint_engine.memory.arena import NodeArena
from verl.checkpoint_engine.memory.committed import PinnedSlots, open_committed
from verl.checkpoint_engine.memory.delta import Applier, Deltas, warm_up
from verl.checkpoint_engine.memory.device_base import DeviceBase
from verl.checkpoint_engine.memory.digest import Manifest, PieceDigests
from verl.checkpoint_engine.memory.packed import PackedRegion
from verl.checkpoint_engine.memory.pinning import Pinned, pages_of
from verl.checkpoint_engine.memory.publishing import SlotPieces, copy_values, publish
from verl.checkpoint_engine.memory.slot import SlotView
from verl.checkpoint_engine.plan.delta_choice import DeltaRequest, Rates
from verl.checkpoint_engine.plan.layout import Layout
from verl.checkpoint_engine.plan.shards import ShardTable
from verl.checkpoint_engine.plan.sync_plan import SyncPlan, make_plan
from verl.checkpoint_engine.plan.types import Box, Shard, TensorSpec
from verl.checkpoint_engine.support import envs
from verl.checkpoint_engine.support.device import has_cuda_context
from verl.checkpoint_engine.support.locality import own_gpu
from verl.doctor.rails import GPUS

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
SHAPES = {
    "rows": ((300, 64), "bfloat16"),
    "columns": ((40, 64), "bfloat16"),
    "float": ((70, 9), "float32"),
    "double": ((33,), "float64"),
    "half": ((5, 7), "float16"),
    "bytes": ((1001,), "uint8"),
    "small": ((3, 3), "float8_e4m3fn"),
    "one": ((), "bfloat16"),
    "large": ((2000, 512), "bfloat16"),
}


@pytest.fixture(params=DEVICES)
def device(request: pytest.FixtureRequest) -> torch.device:
    if request.param == "cuda":
        if not torch.cuda.is_available():
            pytest.skip("torch sees no CUDA device")
        torch.cuda.init()
    return torch.device(request.param, 0) if request.param == "cuda" else torch.device("cpu")


class Source:
    """A whole model, in the dtypes that are sent but for `columns`, which is held in float32."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        generator = torch.Generator().manual_seed(0)
        self.held = {
            name: torch.randn(shape, generator=generator)
            .mul(9)
            .to(torch.float32 if name == "columns" else getattr(torch, dtype))
            .to(device)
            for name, (shape, dtype) in SHAPES.items()
        }

    def specs(self) -> Sequence[TensorSpec]:
        return [TensorSpec(name=name, shape=shape, dtype=dtype) for name, (shape, dtype) in SHAPES.items()]

    def shards(self) -> Sequence[Shard]:
        return [Shard(name, Box.whole(shape)) for name, (shape, _) in SHAPES.items()]

    def copy(self, shard: Shard, destination: torch.Tensor) -> None:
        box = tuple(map(slice, shard.box.start, shard.box.stop))
        copy_values(destination, self.held[shard.name][box])

    def step(self, fraction: float, seed: int) -> None:
        """Other values for about that fraction, NaN among them where the dtype has it."""
        generator = torch.Generator().manual_seed(seed)
        for name, tensor in self.held.items():
            other = torch.randn(tensor.shape, generator=generator).mul(9)
            where = torch.rand(tensor.shape, generator=generator) < fraction
            if tensor.dtype.is_floating_point:
                other[torch.rand(tensor.shape, generator=generator) < 0.01] = float("nan")
            now = torch.where(where, other, tensor.cpu().float()) if tensor.dtype != torch.float64 else other.double()
            self.held[name] = now.to(tensor.dtype).to(self.device)

    def expected(self, name: str) -> torch.Tensor:
        return self.held[name].to(getattr(torch, SHAPES[name][1])).cpu()


@pytest.fixture
def shm() -> Iterator[Path]:
    """What is elsewhere than in shared memory cannot be pinned."""
    with tempfile.TemporaryDirectory(prefix="verl-test-", dir=envs.shm_dir()) as directory:
        yield Path(directory)


@pytest.fixture
def source(device: torch.device) -> Source:
    return Source(device)


@pytest.fixture
def plan(source: Source) -> SyncPlan:
    layout = Layout.of(source.specs())
    return make_plan(layout, [ShardTable.of(layout, source.shards())], block_nbytes=2**16)


def bits(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def assert_packed(region: PackedRegion, source: Source) -> None:
    for place in region.places(source.shards()):
        box = tuple(map(slice, place.shard.box.start, place.shard.box.stop))
        assert bits(place.tensor) == bits(source.expected(place.shard.name)[box]), place.shard


def digests_of(region: PackedRegion, known: PieceDigests) -> np.ndarray:
    return known.completed(region.bytes.numpy(), region.extents, threads=1)


def slot_of(plan: SyncPlan, region: PackedRegion) -> np.ndarray:
    slot = np.zeros(plan.layout.nbytes, np.uint8)
    for (offset, nbytes, _, _), start in zip(plan.extents.of(range(len(plan))), region.packing.offset, strict=True):
        slot[offset : offset + nbytes] = region.bytes.numpy()[start : start + nbytes]
    return slot


def always(base: int, region: PackedRegion) -> DeltaRequest:
    return DeltaRequest(base=base, nbytes=region.nbytes, rates=Rates(), always=True, was_delta=False)


def test_a_region_that_peers_read_gets_what_the_device_has(source: Source, plan: SyncPlan):
    region = PackedRegion(plan, 0)
    for version in range(3):
        publish(source, region)
        assert_packed(region, source)
        source.step(0.5, version)


@pytest.mark.parametrize("place", ["shared memory", "a disk"])
def test_a_slot_gets_what_the_device_has(source: Source, plan: SyncPlan, shm: Path, tmp_path: Path, place: str, caplog):
    path = (shm if place == "shared memory" else tmp_path) / "slot"
    path.write_bytes(bytes(plan.layout.nbytes))
    slot = SlotView(path, plan.layout, writable=True)
    with caplog.at_level(logging.WARNING):
        slot.pin(plan.extents_of(0).spans)
    assert ("cannot be pinned" in caplog.text) is (place == "a disk" and has_cuda_context())
    publish(source, SlotPieces(slot, plan, 0))
    for name, tensor in slot.tensors():
        assert bits(tensor) == bits(source.expected(name)), name
    slot.close()


def test_slots_stay_pinned_until_their_file_is_another(source: Source, plan: SyncPlan, shm: Path, caplog):
    kept = PinnedSlots()
    with NodeArena.create(shm_dir=shm, job="test", node="0", layout=plan.layout, slots=2) as arena:
        mapped = []
        for version in range(6):
            if version == 4:
                arena.begin(version)
                arena.drop()  # its file is replaced
            arena.begin(version)
            pieces = SlotPieces(arena.writable_view(), plan, 0)
            digests = publish(source, pieces).digests.completed(pieces.bytes.numpy(), plan.extents, threads=1)
            arena.commit(version, Manifest.of(version, plan, [digests]))
            with open_committed(arena.directory, version, kept) as (_, view):
                on_device = {name: tensor.to(source.device) for name, tensor in view.tensors()}
                mapped.append(view)
            for name, tensor in on_device.items():
                assert bits(tensor.cpu()) == bits(source.expected(name)), name
            source.step(0.5, version)
        assert mapped[0] is mapped[2]
        assert mapped[1] is mapped[3]
        assert mapped[4] is not mapped[2]
        assert mapped[5] is mapped[3]
        assert [hasattr(view, "bytes") for view in mapped[2:]] == [False, True, True, True]  # until it is unmapped
        assert "cannot be pinned" not in caplog.text
    kept.close()


@pytest.mark.parametrize("fraction", [0.0, 0.001, 0.05, 1.0])
def test_what_changed_on_the_device_leads_to_the_same_bytes(source: Source, plan: SyncPlan, fraction: float):
    warm_up()
    region = PackedRegion(plan, 0)
    owner = OwnerDeltas(plan, 0, region)
    owner.publish(0, source, None)
    owner._base, owner._is_asked = DeviceBase(region, source.device), True
    before = slot_of(plan, region)
    manifest = Manifest.of(0, plan, [owner._completed(owner._last[1])])
    for version in range(1, 4):
        source.step(fraction, version)
        owner.publish(
            version,
            source,
            always(version - 1, region),
        )
        assert_packed(region, source)
        identity, nbytes = owner.leads_from
        after = slot_of(plan, region)
        if fraction < 1:
            assert fitting(manifest, {0: identity}) == {0}
            made, arrived = np.zeros_like(before), PieceDigests.none_of(len(plan))
            deltas = Deltas.parse(plan, 0, owner.bytes[:nbytes])
            assert Applier(plan, before, made, arrived).apply([deltas], threads=1, stopped=lambda: False) == []
            assert made.tobytes() == after.tobytes()
            assert (arrived.values == owner._completed(owner._last[1])).all()
        before, manifest = after, Manifest.of(version, plan, [owner._completed(owner._last[1])])


def test_deltas_made_on_the_device_are_those_made_on_the_host(source: Source, plan: SyncPlan):
    warm_up()
    regions = [PackedRegion(plan, 0) for _ in range(2)]
    owners = [OwnerDeltas(plan, 0, region) for region in regions]
    for owner in owners:
        owner.publish(0, source, None)
    owners[0]._base = DeviceBase(regions[0], source.device)
    for owner in owners:
        owner._is_asked = True
    for version in range(1, 4):
        source.step(0.02, version)
        request = always(version - 1, regions[0])
        for owner in owners:
            owner.publish(version, source, request)
        (_, nbytes), other = owners[0].leads_from, owners[1].leads_from
        assert (owners[0].leads_from[0], nbytes) == other
        assert owners[0].bytes[:nbytes].tobytes() == owners[1].bytes[:nbytes].tobytes()


def test_a_host_copy_that_is_not_what_was_published_is_made_anew(source: Source, plan: SyncPlan, caplog):
    warm_up()
    region = PackedRegion(plan, 0)
    owner = OwnerDeltas(plan, 0, region)
    owner.publish(0, source, None)
    owner._base, owner._is_asked = DeviceBase(region, source.device), True
    owner._last = (0, PieceDigests(owner._completed(owner._last[1]), np.ones(len(plan), np.bool_)))
    region.bytes[100] += 1
    source.step(0.01, 1)
    with caplog.at_level(logging.WARNING):
        owner.publish(1, source, always(0, region))
    assert "differs from the published one" in caplog.text
    assert owner.leads_from == (0, 0)
    assert_packed(region, source)


def test_the_choice_counts_what_changed_on_the_device(source: Source, plan: SyncPlan):
    region = PackedRegion(plan, 0)
    publish(source, region)
    base = DeviceBase(region, source.device)
    places = region.places(source.shards())
    assert base.count_changed(source, places) == 0
    source.held["rows"][7, :5] += 1
    assert base.count_changed(source, places) == base.count_changed(source, places) == 5


class Elsewhere:
    """As torch's module of a device."""

    @staticmethod
    def mem_get_info(device: torch.device) -> tuple[int, int]:
        return 10 * 2**20, 2**40


def test_a_device_without_room_for_the_last_version_is_not_asked(plan: SyncPlan, monkeypatch, caplog):
    monkeypatch.setattr(torch, "get_device_module", lambda device: Elsewhere)
    source = Source(torch.device("cpu"))
    source.device = torch.device("meta")
    with caplog.at_level(logging.INFO, "verl.checkpoint_engine"):
        assert device_base.device_base_for(source, PackedRegion(plan, 0)) is None
    assert "the host compares versions for deltas" in caplog.text


@pytest.mark.gpu
def test_pinned_memory_is_released_with_what_pins_it():
    if not torch.cuda.is_available():
        pytest.skip("torch sees no CUDA device")
    torch.cuda.init()
    memory = torch.zeros(2**20, dtype=torch.uint8)
    pinned = Pinned(memory)
    assert pinned
    assert memory.is_pinned()
    pinned.close()
    assert not memory.is_pinned()
    assert Pinned(memory)  # again


def test_nothing_is_pinned_without_a_device():
    if torch.cuda.is_available():
        pytest.skip("there is one")
    assert not Pinned(torch.zeros(2**20, dtype=torch.uint8))


@pytest.mark.parametrize(
    ("spans", "pages"),
    [
        ([(0, 10)], [(0, 4096)]),
        ([(0, 0)], []),
        ([(8192, 1), (10, 10), (100, 5000)], [(0, 12288)]),
        ([(4000, 96), (8192, 4096)], [(0, 4096), (8192, 12288)]),
    ],
)
def test_pages_are_pinned_once(spans: list[tuple[int, int]], pages: list[tuple[int, int]]):
    base = 2**30
    assert pages_of(base, np.array(spans)) == [(base + low, base + high) for low, high in pages]


@pytest.mark.gpu
def test_a_process_finds_its_gpu_in_sysfs():
    if not torch.cuda.is_available():
        pytest.skip("torch sees no CUDA device")
    torch.zeros(1, device="cuda")
    gpu = own_gpu()
    assert gpu is not None
    assert gpu.resolve() in [found.resolve() for found in GPUS.glob("*:*:*.*")]
