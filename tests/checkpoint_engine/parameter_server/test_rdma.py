"""Which RDMA devices are used, case by case."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from tests.pci_tree import make_tree, set_port
from verl.checkpoint_engine.errors import ConfigError
from verl.checkpoint_engine.links.rdma import (
    choose_wire,
    far_ports,
    get_my_rdma_device,
    get_rdma_devices,
    list_ib_devices,
    parse_nccl_ib_hca,
)

DEVICES = ["mlx5_0", "mlx5_1", "mlx5_10", "mlx4_0", "bnxt_re0"]
MANY = [f"mlx5_{number}" for number in range(50)]


@pytest.fixture
def present(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A stand-in for /sys/class/infiniband, and an environment that names no devices."""
    for name in DEVICES:
        (tmp_path / name).mkdir()
    monkeypatch.delenv("PS_P2P_STORE_RDMA_DEVICES", raising=False)
    monkeypatch.delenv("NCCL_IB_HCA", raising=False)
    return tmp_path


@pytest.mark.parametrize(
    ("value", "selected"),
    [
        ("", DEVICES),
        (" \t\n ", DEVICES),
        ("mlx5", ["mlx5_0", "mlx5_1", "mlx5_10"]),
        ("mlx5_1", ["mlx5_1", "mlx5_10"]),
        ("mlx4,bnxt", ["mlx4_0", "bnxt_re0"]),
        ("bnxt,mlx4", ["mlx4_0", "bnxt_re0"]),
        ("mlx5,mlx5_0", ["mlx5_0", "mlx5_1", "mlx5_10"]),
        ("=mlx5_1", ["mlx5_1"]),
        ("=mlx5_0,mlx4_0", ["mlx5_0", "mlx4_0"]),
        ("^mlx5_1", ["mlx5_0", "mlx4_0", "bnxt_re0"]),
        ("^=mlx5_1", ["mlx5_0", "mlx5_10", "mlx4_0", "bnxt_re0"]),
        ("^=mlx5_1,mlx4_0", ["mlx5_0", "mlx5_10", "bnxt_re0"]),
        ("^", DEVICES),
        ("^=", DEVICES),
        ("=mlx5_0:1,mlx4_0:2", ["mlx5_0", "mlx4_0"]),
        ("mlx5_1:1", ["mlx5_1", "mlx5_10"]),
        ("^mlx5:1", ["mlx4_0", "bnxt_re0"]),
        ("  = mlx5_0 ,, mlx4_0 , ", ["mlx5_0", "mlx4_0"]),
        (" ^ = mlx5_0 , ,mlx4_0", ["mlx5_1", "mlx5_10", "bnxt_re0"]),
        (",mlx4,:1,", ["mlx4_0"]),
    ],
)
def test_nccl_ib_hca_selects_as_nccl_documents(value: str, selected: list[str], caplog: pytest.LogCaptureFixture):
    assert parse_nccl_ib_hca(value, DEVICES) == selected
    assert not caplog.records


@pytest.mark.parametrize(
    ("value", "selected", "unmatched"),
    [
        ("mlx6", [], ["mlx6"]),
        ("=mlx5", [], ["mlx5"]),
        ("mlx6,mlx4,efa", ["mlx4_0"], ["mlx6", "efa"]),
        ("^mlx6", DEVICES, ["mlx6"]),
        ("^=mlx5", DEVICES, ["mlx5"]),
        ("=^mlx5_0", [], ["^mlx5_0"]),
        ("==mlx5_0", [], ["=mlx5_0"]),
        ("^^mlx5_0", DEVICES, ["^mlx5_0"]),
        ("=,", [], []),
    ],
)
def test_a_token_that_matches_nothing_is_a_warning_that_names_it(
    value: str, selected: list[str], unmatched: list[str], caplog: pytest.LogCaptureFixture
):
    with caplog.at_level(logging.WARNING):
        assert parse_nccl_ib_hca(value, DEVICES) == selected
    messages = [record.getMessage() for record in caplog.records]
    assert len(messages) == len(unmatched)
    assert all(repr(token) in message for token, message in zip(unmatched, messages, strict=True))


@pytest.mark.parametrize("value", ["", "mlx5", "^efa"])
def test_at_most_32_devices_are_used(value: str):
    assert parse_nccl_ib_hca(value, MANY) == MANY[:32]


def test_devices_of_the_host_are_listed_in_the_order_of_their_numbers(present: Path):
    assert list_ib_devices(present) == ["bnxt_re0", "mlx4_0", "mlx5_0", "mlx5_1", "mlx5_10"]
    (present / "mlx5_2").mkdir()
    assert list_ib_devices(present)[-3:] == ["mlx5_1", "mlx5_2", "mlx5_10"]


def test_a_host_without_infiniband_has_no_devices(tmp_path: Path):
    assert list_ib_devices(tmp_path / "missing") == []


def test_the_variable_of_the_p2p_store_wins(present: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("NCCL_IB_HCA", "mlx4")
    assert get_rdma_devices(present) == ["mlx4_0"]
    monkeypatch.setenv("PS_P2P_STORE_RDMA_DEVICES", " mlx5_7, mlx5_3 ,")
    assert get_rdma_devices(present) == ["mlx5_7", "mlx5_3"]
    monkeypatch.setenv("PS_P2P_STORE_RDMA_DEVICES", " , ")
    assert get_rdma_devices(present) == ["mlx4_0"]


@pytest.mark.parametrize("value", [None, "", "  ", "efa", "=mlx5", "^mlx,bnxt", "=^mlx5_0"])
def test_all_devices_are_used_when_none_is_selected(
    present: Path, value: str | None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    if value is not None:
        monkeypatch.setenv("NCCL_IB_HCA", value)
    with caplog.at_level(logging.WARNING):
        assert get_rdma_devices(present) == list_ib_devices(present)
    assert bool(caplog.records) == bool(value and value.strip())


@pytest.mark.parametrize(
    ("device_count", "devices", "by_rank"),
    [
        (1, ["a"], "a"),
        (4, ["a"], "aaaa"),
        (4, ["a", "b"], "aabb"),
        (4, ["a", "b", "c", "d"], "abcd"),
        (6, ["b", "a", "c"], "bbaacc"),
    ],
)
def test_contiguous_blocks_of_local_ranks_share_a_device(device_count: int, devices: list[str], by_rank: str):
    assert [get_my_rdma_device(rank, device_count, devices) for rank in range(device_count)] == list(by_rank)


def test_no_device_is_an_error():
    with pytest.raises(RuntimeError, match="PS_P2P_STORE_RDMA_DEVICES"):
        get_my_rdma_device(0, 8, [])


@pytest.mark.parametrize(
    ("local_rank", "device_count", "devices", "message"),
    [
        (0, 2, ["a", "b", "c"], r"more RDMA devices than local ranks: 3 devices \(a, b, c\) for 2 .* divides 2"),
        (0, 8, ["a", "b", "c"], r"do not divide: 3 devices .* Set PS_P2P_STORE_RDMA_DEVICES .* divides 8"),
        (2, 2, ["a"], "local rank 2 is not one of 2"),
        (-1, 2, ["a"], "local rank -1"),
    ],
)
def test_ranks_that_devices_cannot_be_divided_among_are_an_error(
    local_rank: int, device_count: int, devices: list[str], message: str
):
    with pytest.raises(ValueError, match=message):
        get_my_rdma_device(local_rank, device_count, devices)


def test_rdma_is_chosen_where_there_are_devices_unless_told_otherwise(present: Path):
    present_one = present / "one"
    (present_one / "mlx5_0").mkdir(parents=True)
    assert choose_wire(None, 1, 2, present_one) == choose_wire("rdma", 1, 2, present_one) == ("rdma", "mlx5_0")
    assert choose_wire("tcp", 1, 2, present_one) == ("tcp", "")
    assert choose_wire(None, 1, 2, present / "missing") == ("tcp", "")


@pytest.mark.parametrize(
    ("protocol", "folder", "message"),
    [
        ("udp", ".", "must be tcp or rdma, not 'udp'"),
        ("rdma", "missing", "no RDMA device on this host: use TCP"),
        (None, ".", "more RDMA devices than local ranks: .* Set PS_P2P_STORE_RDMA_DEVICES"),
    ],
)
def test_a_wire_that_cannot_be_is_an_error_in_the_configuration(
    present: Path, protocol: str | None, folder: str, message: str
):
    with pytest.raises(ConfigError, match=message):
        choose_wire(protocol, 0, 2, present / folder)


ALL_PORTS = [f"mlx5_{number}:1" for number in range(4)]


def without(*names: str) -> list[str]:
    return [port for port in ALL_PORTS if port.removesuffix(":1") not in names]


@pytest.fixture
def tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, Path]:
    monkeypatch.delenv("PS_P2P_STORE_RDMA_DEVICES", raising=False)
    monkeypatch.delenv("NCCL_IB_HCA", raising=False)
    return make_tree(tmp_path)


def test_all_devices_but_the_one_behind_the_switch_of_the_gpu_are_far(tree):
    gpus, present = tree
    assert far_ports(gpus / "0000:1b:00.0", 8, present) == without("mlx5_3")
    assert far_ports(gpus / "0000:b2:00.0", 8, present) == without("mlx5_2")


@pytest.mark.parametrize(
    "port", [{"state": "1: DOWN"}, {"rate": "100 Gb/sec (2X HDR)"}, {"rate": "?"}, {"state": "4: ACTIVE", "rate": ""}]
)
def test_a_near_device_that_is_down_or_slower_than_others_is_not_preferred(port, tree):
    """Those of its NUMA node are nearest then."""
    gpus, present = tree
    set_port(present / "mlx5_3", **port)
    assert far_ports(gpus / "0000:1b:00.0", 8, present) == without("mlx5_0")


def test_devices_that_are_equally_near_are_all_kept(tree):
    gpus, present = tree
    for name in ("mlx5_0", "mlx5_3"):
        set_port(present / name, state="1: DOWN")
    assert far_ports(gpus / "0000:1b:00.0", 8, present) == []
    assert far_ports(gpus / "0000:b1:00.0", 8, present) == without("mlx5_1")


def test_no_device_is_far_where_none_is_up_or_there(tree, tmp_path):
    gpus, present = tree
    for device in present.iterdir():
        set_port(device, state="2: INIT")
    assert far_ports(gpus / "0000:1b:00.0", 8, present) == []
    assert far_ports(gpus / "0000:1b:00.0", 8, tmp_path / "none") == []


@pytest.mark.parametrize(("ranks", "far"), [(1, []), (3, []), (4, without("mlx5_3"))])
def test_ranks_that_are_fewer_than_devices_may_use_several(ranks: int, far: list[str], tree):
    gpus, present = tree
    assert far_ports(gpus / "0000:1b:00.0", ranks, present) == far


@pytest.mark.parametrize("variable", ["PS_P2P_STORE_RDMA_DEVICES", "NCCL_IB_HCA"])
def test_the_nearest_is_one_of_those_that_the_environment_selects(variable: str, tree, monkeypatch):
    gpus, present = tree
    monkeypatch.setenv(variable, "mlx5_0,mlx5_1")
    assert far_ports(gpus / "0000:1b:00.0", 8, present) == without("mlx5_0")
    monkeypatch.setenv(variable, "mlx5_2")
    assert far_ports(gpus / "0000:1b:00.0", 8, present) == []
