"""Copying out of a source: every piece once, into memory of both kinds, in as few copies as may be."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch

from verl.checkpoint_engine.memory.digest import digest_pieces
from verl.checkpoint_engine.memory.packed import PackedRegion
from verl.checkpoint_engine.memory.publishing import (
    COPY_NBYTES,
    PieceMemory,
    SlotPieces,
    copy_values,
    publish,
    publisher_environment,
)
from verl.checkpoint_engine.memory.slot import SlotView
from verl.checkpoint_engine.plan.layout import Layout
from verl.checkpoint_engine.plan.shards import ShardTable
from verl.checkpoint_engine.plan.sync_plan import SyncPlan, make_plan
from verl.checkpoint_engine.plan.types import Box, Shard, TensorSpec

BLOCK_NBYTES = 1024
TUNABLE = "glibc.cpu.x86_non_temporal_threshold"
WEIGHTS = {
    "rows": torch.randn(300, 16),
    "columns": torch.randn(40, 64),
    "line": torch.randn(700),
    "one": torch.tensor(3.0),
    "empty": torch.zeros(0, 4),
    "cube": torch.randn(6, 10, 8),
}
BOXES = [
    [Box((0, 0), (200, 16)), Box((0, 0), (40, 24)), Box((0,), (333,)), Box((), ()), Box((0, 0, 0), (6, 4, 8))],
    [Box((200, 0), (300, 16)), Box((0, 24), (40, 64)), Box((333,), (700,)), Box((), ()), Box((0, 4, 0), (6, 10, 8))],
]
"""Of every tensor that has elements, what each rank holds: rows, columns, flat ranges; the scalar on both."""


class Source:
    def __init__(self, held: Sequence[Box]) -> None:
        names = [name for name in WEIGHTS if name != "empty"]
        self._shards = [Shard(name, box) for name, box in zip(names, held, strict=True)]
        self.copied: list[int] = []

    def specs(self) -> Sequence[TensorSpec]:
        return [TensorSpec(name=name, shape=tuple(value.shape), dtype="bfloat16") for name, value in WEIGHTS.items()]

    def shards(self) -> Sequence[Shard]:
        return self._shards

    def copy(self, shard: Shard, destination: torch.Tensor) -> None:
        assert any(own.name == shard.name and own.box.contains(shard.box) for own in self._shards)
        self.copied.append(destination.nbytes)
        destination.copy_(WEIGHTS[shard.name][tuple(map(slice, shard.box.start, shard.box.stop))])


@pytest.fixture
def sources() -> list[Source]:
    return [Source(held) for held in BOXES]


@pytest.fixture
def plan(sources: list[Source]) -> SyncPlan:
    layout = Layout.of(sources[0].specs())
    tables = [ShardTable.of(layout, source.shards()) for source in sources]
    return make_plan(layout, tables, block_nbytes=BLOCK_NBYTES)


@pytest.fixture
def slot(plan: SyncPlan, tmp_path: Path) -> SlotView:
    path = tmp_path / "slot"
    path.write_bytes(bytes(plan.layout.nbytes))
    return SlotView(path, plan.layout, writable=True)


def digests(memory: PieceMemory) -> list[int]:
    return digest_pieces(memory.bytes.numpy(), memory.extents).tolist()


def test_all_ranks_together_fill_a_slot(sources: list[Source], plan: SyncPlan, slot: SlotView):
    published = [publish(source, SlotPieces(slot, plan, owner)) for owner, source in enumerate(sources)]
    for name, tensor in slot.tensors():
        assert torch.equal(tensor, WEIGHTS[name].bfloat16()), name
    assert [publication.nbytes for publication in published] == [plan.nbytes_of(owner) for owner in range(2)]


@pytest.mark.parametrize("owner", [0, 1])
def test_pieces_have_the_same_digests_in_a_slot_and_packed(
    sources: list[Source], plan: SyncPlan, slot: SlotView, owner: int
):
    in_slot, packed = SlotPieces(slot, plan, owner), PackedRegion(plan, owner)
    publish(sources[owner], in_slot)
    publish(sources[owner], packed)
    assert digests(in_slot) == digests(packed)
    assert len(set(digests(packed))) == len(plan.pieces_of(owner))


def test_neighbouring_rows_are_one_copy(sources: list[Source], plan: SyncPlan, slot: SlotView):
    publish(sources[0], SlotPieces(slot, plan, 0))
    assert len(plan.pieces_of(0)) > 2 * len(sources[0].copied)
    assert 200 * 16 * 2 in sources[0].copied


def test_a_copy_has_at_most_so_many_bytes():
    layout = Layout.of([TensorSpec(name="w", shape=(3 * COPY_NBYTES // 64, 32), dtype="bfloat16")])
    held = [Shard("w", Box.whole(layout.specs[0].shape))]
    memory = PackedRegion(make_plan(layout, [ShardTable.of(layout, held)], block_nbytes=2**20), 0)
    assert [place.tensor.nbytes for place in memory.places(held)] == [COPY_NBYTES] * 3


def test_a_copy_does_not_reach_from_one_shard_into_the_next():
    layout = Layout.of([TensorSpec(name="w", shape=(30, 8), dtype="float32")])
    held = [Shard("w", Box((row, 0), (row + 10, 8))) for row in (0, 10, 20)]
    memory = PackedRegion(make_plan(layout, [ShardTable.of(layout, held)], block_nbytes=128), 0)
    assert [place.shard for place in memory.places(held)] == held


def test_an_owner_of_nothing_publishes_nothing(sources: list[Source], plan: SyncPlan):
    layout = plan.layout
    tables = [*(ShardTable.of(layout, source.shards()) for source in sources), ShardTable.empty(layout, 0)]
    memory = PackedRegion(make_plan(layout, tables, block_nbytes=BLOCK_NBYTES), 2)
    assert publish(sources[0], memory).nbytes == 0
    assert digests(memory) == []


class Viewable(Source):
    """Holds its parts as they are sent, and shows what lies in one run."""

    def __init__(self, held: Sequence[Box]) -> None:
        super().__init__(held)
        self.held = {
            shard.name: WEIGHTS[shard.name][tuple(map(slice, shard.box.start, shard.box.stop))].bfloat16().contiguous()
            for shard in self._shards
        }

    def view(self, shard: Shard) -> torch.Tensor | None:
        (own,) = [own for own in self._shards if own.name == shard.name]
        bounds = zip(own.box.start, shard.box.start, shard.box.stop, strict=True)
        values = self.held[shard.name][tuple(slice(start - base, stop - base) for base, start, stop in bounds)]
        return values if values.is_contiguous() else None


@pytest.mark.parametrize("owner", [0, 1])
def test_what_a_source_shows_is_digested_on_the_way(
    plan: SyncPlan, slot: SlotView, owner: int, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("verl.checkpoint_engine.memory.publishing.CACHED_NBYTES", 300)  # less than a piece
    memory = SlotPieces(slot, plan, owner)
    publication = publish(Viewable(BOXES[owner]), memory)
    digested = publication.digests.known
    assert publication.digests.values[digested].tolist() == np.array(digests(memory), np.uint64)[digested].tolist()
    strided = memory.extents.rows > 1
    assert strided.any()
    assert (digested == ~strided).all()


def test_a_source_that_shows_values_fills_a_slot_as_one_that_copies_does(
    sources: list[Source], plan: SyncPlan, slot: SlotView, tmp_path: Path
):
    path = tmp_path / "copied"
    path.write_bytes(bytes(plan.layout.nbytes))
    copied = SlotView(path, plan.layout, writable=True)
    for owner, source in enumerate(sources):
        publish(Viewable(BOXES[owner]), SlotPieces(slot, plan, owner))
        publish(source, SlotPieces(copied, plan, owner))
    assert torch.equal(slot.bytes, copied.bytes)


def test_digests_are_of_what_the_trainer_had_whatever_becomes_of_the_copy(plan: SyncPlan):
    memory = PackedRegion(plan, 0)
    publication = publish(Viewable(BOXES[0]), memory)
    assert publication.digests.known.all()
    assert publication.digests.values.tolist() == digests(memory)
    memory.bytes[int(memory.extents.offset[1])] ^= 1
    (different,) = np.flatnonzero(publication.digests.values != digests(memory))
    assert different == 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("values", [torch.randn(6, 8), torch.randn(8, 6).T, torch.randn(12, 8)[::2], torch.zeros(0, 8)])
def test_values_arrive_converted_or_not_whatever_their_strides(values: torch.Tensor, dtype: torch.dtype):
    destination = torch.full(values.shape, 7.0, dtype=dtype)
    copy_values(destination, values)
    assert torch.equal(destination, values.to(dtype))
    columns = torch.full((values.shape[0], 20), 7.0, dtype=dtype)
    copy_values(columns[:, 2:10] if values.shape[1] == 8 else columns[:, 2:8], values)
    assert torch.equal(columns[:, 2 : 2 + values.shape[1]], values.to(dtype))
    assert (columns[:, :2] == 7).all()


@pytest.mark.parametrize(
    ("given", "added"),
    [
        (None, {"GLIBC_TUNABLES": "glibc.cpu.x86_non_temporal_threshold=262144"}),
        (
            "glibc.malloc.check=1",
            {"GLIBC_TUNABLES": "glibc.malloc.check=1:glibc.cpu.x86_non_temporal_threshold=262144"},
        ),
        ("glibc.cpu.x86_non_temporal_threshold=4096", {}),
    ],
)
def test_a_publisher_keeps_the_tunables_that_its_user_has_set(monkeypatch, given: str | None, added: dict[str, str]):
    if given is None:
        monkeypatch.delenv("GLIBC_TUNABLES", raising=False)
    else:
        monkeypatch.setenv("GLIBC_TUNABLES", given)
    assert publisher_environment() == added
