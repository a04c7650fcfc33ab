"""Digests and manifests: damage is found, named and never passed on."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest
import xxhash

from verl.checkpoint_engine.errors import IntegrityError
from verl.checkpoint_engine.memory.digest import Manifest, PieceDigests, digest_pieces, named, verify
from verl.checkpoint_engine.plan.layout import Layout
from verl.checkpoint_engine.plan.shards import ShardTable
from verl.checkpoint_engine.plan.sync_plan import SyncPlan, make_plan
from verl.checkpoint_engine.plan.types import Box, Shard, TensorSpec

LAYOUT = Layout.of(
    [TensorSpec(name="rows", shape=(8, 64), dtype="uint8"), TensorSpec(name="columns", shape=(8, 64), dtype="uint8")]
)


def plan(block_nbytes: int = 128) -> SyncPlan:
    """Two ranks; the one tensor is split between them by rows, the other by columns. Pieces of 128 bytes."""
    held = [
        [Shard("rows", Box((0, 0), (4, 64))), Shard("columns", Box((0, 0), (8, 32)))],
        [Shard("rows", Box((4, 0), (8, 64))), Shard("columns", Box((0, 32), (8, 64)))],
    ]
    return make_plan(LAYOUT, [ShardTable.of(LAYOUT, shards) for shards in held], block_nbytes=block_nbytes)


@pytest.fixture
def region() -> np.ndarray:
    return np.random.default_rng(0).integers(0, 256, LAYOUT.nbytes, np.uint8)


def manifest_of(region: np.ndarray) -> Manifest:
    made = plan()
    per_owner = [digest_pieces(region, made.extents_of(owner)) for owner in range(made.num_owners)]
    return Manifest.of(7, made, per_owner)


def test_a_digest_is_xxh3_of_the_box_in_c_order(region: np.ndarray):
    manifest = manifest_of(region)
    for piece in range(len(manifest.plan)):
        tensor = int(manifest.plan.boxes.tensor[piece])
        box = manifest.plan.boxes.box(piece, 2)
        values = region[LAYOUT.offsets[tensor] :][:512].reshape(8, 64)[tuple(map(slice, box.start, box.stop))]
        assert int(manifest.digests[piece]) == xxhash.xxh3_64_intdigest(values.tobytes())


@pytest.mark.parametrize("threads", [1, 2, 7, 100])
def test_what_the_trainer_sent_passes(region: np.ndarray, threads: int):
    verify(region, manifest_of(region), threads=threads)


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize(
    ("offset", "named"),
    [
        (0, "rows[0:2, 0:64] (bytes 0..128, from trainer-0)"),
        (511, "rows[6:8, 0:64] (bytes 384..512, from trainer-1)"),
        (512, "columns[0:4, 0:32] (bytes 512..736, from trainer-0)"),
        (512 + 63, "columns[0:4, 32:64] (bytes 544..768, from trainer-1)"),
        (512 + 64 * 7 + 31, "columns[4:8, 0:32] (bytes 768..992, from trainer-0)"),
    ],
)
def test_any_flipped_bit_is_found_and_named(region: np.ndarray, offset: int, named: str, threads: int):
    manifest = manifest_of(region)
    region[offset] ^= 1
    with pytest.raises(IntegrityError) as raised:
        verify(region, manifest, threads=threads)
    assert named in str(raised.value)
    assert f"1 of {len(manifest.plan)} pieces" in str(raised.value)
    assert (raised.value.version, raised.value.phase) == (7, "verify")


def test_pieces_that_were_digested_on_the_way_are_compared_and_not_read_again(region: np.ndarray):
    manifest = manifest_of(region)
    arrived = PieceDigests(manifest.digests.copy(), np.arange(len(manifest.plan)) < 2)
    region[0] ^= 1  # of a piece that is known
    verify(region, manifest, arrived=arrived)
    arrived.values[1] ^= np.uint64(1)
    region[511] ^= 1  # of one that is not
    with pytest.raises(IntegrityError, match=r"2 of 8 pieces .*rows\[2:4.*rows\[6:8"):
        verify(region, manifest, arrived=arrived)


def test_much_damage_is_counted_and_the_first_pieces_named(region: np.ndarray):
    manifest = manifest_of(region)
    with pytest.raises(IntegrityError, match=r"^\[version 7, verify\] 8 of 8 pieces .*rows\[0:2"):
        verify(region ^ 1, manifest)
    many = plan(block_nbytes=64)
    assert named(many, range(10)).endswith("; and 2 more")
    assert named(many, range(8)) == "; ".join(map(many.describe, range(8)))


def test_the_gaps_between_tensors_do_not_matter():
    layout = Layout.of(
        [TensorSpec(name="a", shape=(3,), dtype="uint8"), TensorSpec(name="b", shape=(3,), dtype="uint8")]
    )
    held = [ShardTable.of(layout, [Shard(spec.name, Box.whole(spec.shape)) for spec in layout.specs])]
    made = make_plan(layout, held, block_nbytes=128)
    region = np.zeros(layout.nbytes, np.uint8)
    manifest = Manifest.of(1, made, [digest_pieces(region, made.extents)])
    region[3:256] = 9
    verify(region, manifest)
    region[2] = 9
    with pytest.raises(IntegrityError, match="1 of 2 pieces"):
        verify(region, manifest)


def test_digests_that_are_missing_or_too_many_are_refused_by_owner(region: np.ndarray):
    made = plan()
    good = digest_pieces(region, made.extents_of(0))
    with pytest.raises(IntegrityError, match="trainer-1 sent 3 digests for 4 pieces"):
        Manifest.of(7, made, [good, good[:3]])


def test_a_manifest_survives_its_encoding(region: np.ndarray):
    manifest = manifest_of(region)
    again = Manifest.decode(manifest.encode())
    assert again.version == 7
    assert again.plan.layout == LAYOUT
    verify(region, again)


@pytest.mark.parametrize("data", [b"", b"garbage", msgspec.msgpack.encode([1, 2]), msgspec.msgpack.encode("x")])
def test_bytes_that_are_no_manifest_are_refused(data: bytes):
    with pytest.raises(IntegrityError, match="not a manifest"):
        Manifest.decode(data)


def test_a_manifest_of_another_format_is_refused_with_both_numbers():
    with pytest.raises(IntegrityError, match="has format 2; this code reads format 1"):
        Manifest.decode(msgspec.msgpack.encode([2, 7, b"", b""]))


def test_a_manifest_whose_plan_or_digests_are_damaged_is_refused(region: np.ndarray):
    form, version, encoded_plan, digests = msgspec.msgpack.decode(manifest_of(region).encode())
    for damaged in ([form, version, b"damaged", digests], [form, version, encoded_plan, digests[:-8]]):
        with pytest.raises(IntegrityError, match="not a manifest"):
            Manifest.decode(msgspec.msgpack.encode(damaged))
