"""What the doctor says of GPUs and RDMA devices, on file trees like those of sysfs."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.pci_tree import make_tree
from verl.doctor.rails import rails


@pytest.fixture
def host(tmp_path: Path) -> dict[str, Path]:
    gpus, present = make_tree(tmp_path)
    return {"gpus_in": gpus, "present_in": present}


def test_the_device_behind_the_same_switch_is_the_near_one(host):
    (found,) = rails("here", ["mlx5_3", "mlx5_0", "mlx5_1", "mlx5_2"], **host)
    assert (found.state, found.remedy) == ("ok", "")
    assert found.found == (
        "0000:1b:00.0 (NUMA 0) is near mlx5_3; 0000:1c:00.0 (NUMA 0) is near mlx5_0; "
        "0000:b1:00.0 (NUMA 1) is near mlx5_1; 0000:b2:00.0 (NUMA 1) is near mlx5_2"
    )


def test_a_device_that_would_be_used_from_another_numa_node_is_named(host):
    (found,) = rails("here", ["mlx5_0", "mlx5_1", "mlx5_2", "mlx5_3"], **host)
    assert found.state == "slow"
    assert found.found.endswith(
        "ParameterServers would use mlx5_1 (NUMA 1) for 0000:1c:00.0, mlx5_3 (NUMA 0) for 0000:b2:00.0"
    )
    assert "PS_P2P_STORE_RDMA_DEVICES" in found.remedy


def test_where_no_switch_is_shared_those_of_the_same_node_are_near(host):
    (found,) = rails("here", ["mlx5_1", "mlx5_2"], **host)
    assert "0000:b1:00.0 (NUMA 1) is near mlx5_1" in found.found
    assert "0000:1b:00.0 (NUMA 0) is near mlx5_1, mlx5_2" in found.found


def test_nothing_is_said_without_gpus_or_without_those_devices(host, tmp_path):
    assert list(rails("here", ["mlx5_0"], gpus_in=tmp_path / "none", present_in=host["present_in"])) == []
    assert list(rails("here", ["mlx5_9"], **host)) == []
    assert list(rails("here", [], **host)) == []
