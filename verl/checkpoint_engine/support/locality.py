"""Where a device of this host is: which others are beside it, and which cores are on its NUMA node. From sysfs."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from pathlib import Path

from .device import has_cuda_context

logger = logging.getLogger(__name__)
PCI = Path("/sys/bus/pci/devices")
NUMA = Path("/sys/devices/system/node")


def own_gpu() -> Path | None:
    """The current CUDA device of this thread in `PCI`; None in a process without CUDA, or if torch does not tell."""
    if not has_cuda_context():
        return None
    import torch

    gpu = torch.cuda.get_device_properties(torch.cuda.current_device())
    domain, bus, slot = (getattr(gpu, f"pci_{part}_id", -1) for part in ("domain", "bus", "device"))
    found = PCI / f"{domain:04x}:{bus:02x}:{slot:02x}.0"
    return found if found.exists() else None  # also in a torch without these numbers


def nearest(device: Path, places: Mapping[str, Path]) -> list[str]:
    """Those of `places` that share most of the way from the root of PCI with `device`; of equals, those on its NUMA
    node."""

    def shared(place: Path) -> tuple[int, bool]:
        common = os.path.commonpath([device.resolve(), place.resolve()])
        return len(Path(common).parts), numa_node(place) == numa_node(device)

    most = max(map(shared, places.values()), default=None)
    return [name for name, place in places.items() if shared(place) == most]


def numa_node(device: Path) -> int:
    """The NUMA node of a PCI device; -1 where the firmware does not tell."""
    try:
        return int((device / "numa_node").read_text("utf-8"))
    except (OSError, ValueError):
        return -1


def stay_near(device: Path | None, nodes_in: Path = NUMA) -> None:
    """Bind this thread, and those that it starts, to the cores of the device's NUMA node that it may use.

    Memory that such threads touch first is on that node, too. Nothing changes for None, on a host with one node, or
    where the process has no core there or is bound to the node already.
    """
    allowed = os.sched_getaffinity(0)
    near = allowed & _cores_of(numa_node(device), nodes_in) if device is not None else set()
    if device is None or not near or near == allowed:
        return
    os.sched_setaffinity(0, near)
    logger.info(
        "weights are copied by the %d cores of NUMA node %d, beside %s", len(near), numa_node(device), device.name
    )


def _cores_of(node: int, nodes_in: Path) -> set[int]:
    """Empty if unknown."""
    try:
        spans = [
            span.split("-") for span in (nodes_in / f"node{node}" / "cpulist").read_text("utf-8").strip().split(",")
        ]
        return {core for span in spans for core in range(int(span[0]), int(span[-1]) + 1)}
    except (OSError, ValueError):
        return set()
