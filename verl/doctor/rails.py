"""Which RDMA device of this host is nearest to each GPU, from sysfs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from verl.checkpoint_engine.links.rdma import INFINIBAND, get_my_rdma_device
from verl.checkpoint_engine.support.locality import nearest, numa_node
from verl.doctor.finding import Finding

GPUS = Path("/sys/bus/pci/drivers/nvidia")


def rails(host: str, devices: Sequence[str], gpus_in: Path = GPUS, present_in: Path = INFINIBAND) -> Iterator[Finding]:
    """A finding if the host has GPUs and RDMA devices. `devices`: those that ParameterServers would use, which divide
    the ranks into contiguous blocks, in the order of the GPUs' PCI addresses."""
    gpus = sorted(gpus_in.glob("*:*:*.*"))
    places = {name: present_in / name / "device" for name in devices}
    if not gpus or not all(place.exists() for place in places.values()) or not places:
        return
    told, far = [], []
    for rank, gpu in enumerate(gpus):
        near = nearest(gpu, places)
        told.append(f"{gpu.name} (NUMA {numa_node(gpu)}) is near {', '.join(near)}")
        try:
            chosen = get_my_rdma_device(rank, len(gpus), devices)
        except ValueError:  # ParameterServers say what to set
            continue
        if numa_node(places[chosen]) != numa_node(gpu):
            far.append(f"{chosen} (NUMA {numa_node(places[chosen])}) for {gpu.name}")
    yield Finding(
        check="rails",
        where=host,
        state="slow" if far else "ok",
        found="; ".join(told) + (f"; ParameterServers would use {', '.join(far)}" if far else ""),
        remedy="name the devices in the order of the GPUs: PS_P2P_STORE_RDMA_DEVICES" if far else "",
    )
