"""File trees like those of sysfs: a host with two sockets, a PCI switch for each pair of GPU and RDMA device."""

from __future__ import annotations

from pathlib import Path

SWITCHES = {
    "pci0000:15/0000:15:01.0": ("0000:1b:00.0", "mlx5_3", 0),
    "pci0000:15/0000:15:02.0": ("0000:1c:00.0", "mlx5_0", 0),
    "pci0000:b0/0000:b0:01.0": ("0000:b1:00.0", "mlx5_1", 1),
    "pci0000:b0/0000:b0:02.0": ("0000:b2:00.0", "mlx5_2", 1),
}


def make_tree(root: Path) -> tuple[Path, Path]:
    """Directories like /sys/bus/pci/drivers/nvidia and /sys/class/infiniband, made below `root`."""
    gpus, present = root / "nvidia", root / "infiniband"
    for number, (switch, (gpu, name, node)) in enumerate(SWITCHES.items()):
        for link, address in ((gpus / gpu, gpu), (present / name / "device", f"0000:ff:{number:02x}.0")):
            device = root / "devices" / switch / address
            device.mkdir(parents=True)
            (device / "numa_node").write_text(f"{node}\n")
            link.parent.mkdir(parents=True, exist_ok=True)
            link.symlink_to(device)
        set_port(present / name)
    (gpus / "module").mkdir()
    return gpus, present


def set_port(device: Path, state: str = "4: ACTIVE", rate: str = "400 Gb/sec (4X NDR)") -> None:
    """Of an RDMA device with one port."""
    port = device / "ports" / "1"
    port.mkdir(parents=True, exist_ok=True)
    (port / "state").write_text(f"{state}\n")
    (port / "rate").write_text(f"{rate}\n")
