"""Threads beside a device, on file trees like those of sysfs, with this host's cores."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from verl.checkpoint_engine.memory.threads import memory_threads
from verl.checkpoint_engine.support.locality import nearest, own_gpu, stay_near

CORES = sorted(os.sched_getaffinity(0))


@pytest.fixture
def host(tmp_path: Path) -> Callable[[dict[int, str], int], tuple[Path, Path]]:
    def make(nodes: dict[int, str], of_device: int) -> tuple[Path, Path]:
        """(a device on node `of_device`, a stand-in for /sys/devices/system/node); node -> cores."""
        for node, cores in nodes.items():
            (tmp_path / f"node{node}").mkdir()
            (tmp_path / f"node{node}" / "cpulist").write_text(f"{cores}\n")
        device = tmp_path / "0000:1b:00.0"
        device.mkdir()
        (device / "numa_node").write_text(f"{of_device}\n")
        return device, tmp_path

    return make


def cores_of_threads(device: Path | None, nodes: Path) -> tuple[set[int], set[int]]:
    """Of a thread that stays near the device, and of one that it starts then."""
    with ThreadPoolExecutor(1) as of_sync:
        of_sync.submit(stay_near, device, nodes).result()
        return of_sync.submit(_with_a_helper).result()


def _with_a_helper() -> tuple[set[int], set[int]]:
    with ThreadPoolExecutor(1) as helper:
        return os.sched_getaffinity(0), helper.submit(os.sched_getaffinity, 0).result()


@pytest.mark.skipif(len(CORES) < 2, reason="one core")
def test_a_thread_and_its_helpers_stay_on_the_node_of_the_device(host, caplog):
    near, far = CORES[-1], ",".join(map(str, CORES[:-1]))
    device, nodes = host({0: far, 1: f"{near},4000-4003"}, 1)
    with caplog.at_level(logging.INFO, "verl.checkpoint_engine"):
        assert cores_of_threads(device, nodes) == ({near}, {near})
    assert set(CORES) == os.sched_getaffinity(0)  # the trainer's own threads are as they were
    assert [record.getMessage() for record in caplog.records] == [
        "weights are copied by the 1 cores of NUMA node 1, beside 0000:1b:00.0"
    ]


@pytest.mark.skipif(len(CORES) < 2, reason="one core")
def test_a_thread_on_one_node_copies_with_as_many_helpers(host):
    device, nodes = host({0: str(CORES[0])}, 0)
    with ThreadPoolExecutor(1) as of_sync:
        of_sync.submit(stay_near, device, nodes).result()
        assert of_sync.submit(memory_threads).result() == memory_threads() > 1


@pytest.mark.parametrize(
    ("cores", "of_device"),
    [
        pytest.param(f"0-{CORES[-1]}", 0, id="one node"),
        pytest.param(f"0-{CORES[-1]}", -1, id="the firmware does not tell"),
        pytest.param("4000-4095", 0, id="the process may use no core there"),
        pytest.param("", 0, id="memory without cores"),
    ],
)
def test_nothing_changes(cores: str, of_device: int, host, caplog):
    with caplog.at_level(logging.INFO, "verl.checkpoint_engine"):
        assert cores_of_threads(*host({0: cores}, of_device)) == (set(CORES), set(CORES))
    assert not caplog.records


def test_nothing_changes_without_a_device(tmp_path):
    assert own_gpu() is None
    assert cores_of_threads(None, tmp_path) == (set(CORES), set(CORES))
    assert nearest(tmp_path, {}) == []
