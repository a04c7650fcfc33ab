"""How large buckets are, what is in them, in which order they travel: cases, and what holds for all."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from verl.checkpoint_engine.errors import ConfigError, PlanError
from verl.checkpoint_engine.parameter_server.buckets import buckets_of, choose_bucket_size, order_of
from verl.checkpoint_engine.parameter_server.rank_device import CPU_BUCKET_NBYTES, Device
from verl.checkpoint_engine.parameter_server.records import BufferMeta, PackedTensor, RankMetas

ALIGNED = 16


def meta_of(rank: int, *buffers: list[int], name: str = "w") -> RankMetas:
    """A rank whose buffers hold tensors of these sizes, aligned."""
    made = []
    for number, sizes in enumerate(buffers):
        tensors, end = [], 0
        for index, size in enumerate(sizes):
            tensor_name = f"{name}{rank}.{number}.{index}"
            tensors.append(PackedTensor(name=tensor_name, shape=(size,), dtype="uint8", offset=end, nbytes=size))
            end = -(-(end + size) // ALIGNED) * ALIGNED
        made.append(BufferMeta(address=1000 * (number + 1), nbytes=end, tensors=tuple(tensors)))
    return RankMetas(
        rank=rank, host="h", device_id=f"d{rank}", rdma_device=f"d{rank}", p2p_address="", buffers=tuple(made)
    )


@pytest.mark.parametrize(
    ("usable", "caps", "sizes", "nbytes", "staged"),
    [
        pytest.param({0: 90, 1: 120}, {0: 99, 1: 99}, [20, 20, 20, 20], 30, True, id="a third of the least memory"),
        pytest.param({0: 900, 1: 900}, {0: 99, 1: 50}, [20, 20, 90], None, False, id="the cap is below a tensor"),
        pytest.param({0: 900, 1: 900}, {0: 99, 1: 60}, [20, 20, 50, 50], 60, True, id="the strictest cap"),
        pytest.param({0: 90}, {0: 99}, [40, 20, 20], 45, False, id="half without staging, for the largest tensor"),
        pytest.param({0: 80}, {0: 99}, [40, 20, 20], 40, False, id="just enough"),
        pytest.param({0: 79}, {0: 99}, [40, 20, 20], None, False, id="one byte short"),
        pytest.param({0: 10**9}, {0: 10**8}, [40, 20], 80, True, id="never more than the largest buffer"),
        pytest.param({0: 10}, {0: 10}, [], 1, False, id="no tensors"),
        pytest.param({0: 10}, {0: 10}, [0, 0], 1, True, id="tensors without bytes"),
    ],
)
def test_all_ranks_agree_on_the_size_of_a_bucket(
    usable: dict[int, int], caps: dict[int, int], sizes: list[int], nbytes: int | None, staged: bool
):
    metas = {0: meta_of(0, sizes)} if sizes else {0: meta_of(0)}
    if nbytes is None:
        with pytest.raises(ConfigError, match=r"tensor 'w0\.0\.\d' has \d+ bytes"):
            choose_bucket_size(usable, caps, metas)
    else:
        size = choose_bucket_size(usable, caps, metas)
        assert (size.nbytes, size.staged) == (nbytes, staged)


def test_the_rank_and_the_setting_that_are_short_are_named():
    metas = {0: meta_of(0, [100])}
    with pytest.raises(ConfigError, match="'w0.0.0' has 100 bytes, more than a bucket of rank 1 .50.: set PS_MAX_BUC"):
        choose_bucket_size({0: 9999, 1: 9999}, {0: 9999, 1: 50}, metas)
    with pytest.raises(ConfigError, match="so two buckets need twice that, but rank 1 can use 199 bytes of its device"):
        choose_bucket_size({0: 9999, 1: 199}, {0: 9999, 1: 9999}, metas)


def test_a_bucket_holds_the_largest_tensor_unless_a_cap_is_set(monkeypatch: pytest.MonkeyPatch):
    device = Device.of(0, 1, None)
    monkeypatch.delenv("PS_MAX_BUCKET_SIZE_GB", raising=False)
    assert device.max_bucket_nbytes(1000) == CPU_BUCKET_NBYTES
    assert device.max_bucket_nbytes(2**40) == 2**40
    monkeypatch.setenv("PS_MAX_BUCKET_SIZE_GB", "0.5")
    assert device.max_bucket_nbytes(2**40) == 2**29


@pytest.mark.parametrize(
    ("buffers", "bucket_nbytes", "expected"),
    [
        ([[]], 32, []),
        ([[16, 16, 16]], 32, [(0, 0, 32, 2), (0, 32, 16, 1)]),
        ([[5, 5, 5]], 37, [(0, 0, 37, 3)]),
        ([[5, 5, 5]], 36, [(0, 0, 21, 2), (0, 32, 5, 1)]),
        ([[32, 1], [1]], 32, [(0, 0, 32, 1), (0, 32, 1, 1), (1, 0, 1, 1)]),
        ([[0, 32, 0]], 32, [(0, 0, 32, 3)]),
        ([[0]], 32, [(0, 0, 0, 1)]),
    ],
)
def test_neighbouring_tensors_share_a_bucket(
    buffers: list[list[int]], bucket_nbytes: int, expected: list[tuple[int, int, int, int]]
):
    found = buckets_of(meta_of(3, *(sizes for sizes in buffers if sizes)), bucket_nbytes)
    assert [(bucket.buffer, bucket.offset, bucket.nbytes, len(bucket.tensors)) for bucket in found] == expected
    assert all(bucket.owner == 3 and bucket.address == 1000 * (bucket.buffer + 1) + bucket.offset for bucket in found)


def test_owners_take_turns_in_a_broadcast():
    metas = {rank: meta_of(rank, [16] * count) for rank, count in ((0, 3), (1, 0), (2, 1))}
    order = order_of(metas, 16, None)
    assert [(root, bucket.owner, bucket.offset) for root, bucket in order] == [
        (0, 0, 0),
        (2, 2, 0),
        (0, 0, 16),
        (0, 0, 32),
    ]


def test_receivers_pull_by_device_in_p2p():
    metas = {rank: meta_of(rank, [16, 16]) for rank in (0, 1)}
    receivers = [
        msgspec.structs.replace(meta_of(rank), host="other", rdma_device=device)
        for rank, device in ((4, "a"), (5, "a"), (6, "b"))
    ]
    order = order_of(metas, 16, receivers)
    assert [(root, bucket.owner, bucket.offset) for root, bucket in order] == [
        (4, 0, 0),
        (6, 1, 0),
        (4, 0, 16),
        (6, 1, 16),
    ]


def test_a_tensor_that_two_ranks_hold_is_named_with_them():
    twin = msgspec.structs.replace(meta_of(0, [16]), rank=5)
    with pytest.raises(PlanError, match=r"several ranks: w0.0.0 \(ranks 0, 5\)"):
        order_of({0: meta_of(0, [16]), 5: twin}, 16, None)


@given(
    sizes=st.lists(st.lists(st.integers(0, 100), min_size=1, max_size=12), max_size=3),
    bucket_nbytes=st.integers(100, 400),
)
def test_every_tensor_is_in_one_bucket_at_its_place(sizes: list[list[int]], bucket_nbytes: int):
    meta = meta_of(0, *sizes)
    found = []
    for bucket in buckets_of(meta, bucket_nbytes):
        assert bucket.nbytes <= bucket_nbytes
        for tensor in bucket.tensors:
            assert 0 <= tensor.offset <= tensor.offset + tensor.nbytes <= bucket.nbytes
            found.append((bucket.buffer, bucket.offset + tensor.offset, tensor.name))
    assert found == [
        (number, tensor.offset, tensor.name) for number, buffer in enumerate(meta.buffers) for tensor in buffer.tensors
    ]
