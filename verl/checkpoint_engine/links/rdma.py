"""Choose the RDMA devices of this host for P2P stores, and the one of each rank. No torch, no verbs library."""

from __future__ import annotations

import logging
import re
import socket
from collections.abc import Sequence
from pathlib import Path

from ..errors import ConfigError
from ..support import envs
from ..support.locality import nearest

logger = logging.getLogger(__name__)

INFINIBAND = Path("/sys/class/infiniband")
MAX_DEVICES = 32
"""The most devices that NCCL uses."""


def list_ib_devices(present_in: Path = INFINIBAND) -> list[str]:
    """The RDMA devices of this host, `mlx5_2` before `mlx5_10`; empty if it has none."""
    return sorted((path.name for path in present_in.glob("*")), key=_by_number)


def parse_nccl_ib_hca(value: str, available: list[str]) -> list[str]:
    """The devices of `available`, in its order, that `NCCL_IB_HCA=value` selects; at most 32, perhaps none.

    `mlx5` selects by prefix, `=mlx5_0,mlx5_1` by exact name; `^mlx5_3` and `^=mlx5_3` exclude instead. Ports after a
    colon, blanks and empty items are ignored. A blank value selects all.
    """
    rule = value.strip()
    excluding = rule.startswith("^")
    rule = rule.removeprefix("^").lstrip()
    exact = rule.startswith("=")
    tokens = [token for item in rule.removeprefix("=").split(",") if (token := item.partition(":")[0].strip())]
    named: set[str] = set()
    for token in tokens:
        matches = {name for name in available if (name == token if exact else name.startswith(token))}
        if not matches:
            logger.warning(
                "NCCL_IB_HCA=%s: %r matches none of this host's RDMA devices (%s)",
                value,
                token,
                ", ".join(available) or "there are none",
            )
        named |= matches
    everything = not value.strip()
    return [name for name in available if everything or (name in named) != excluding][:MAX_DEVICES]


def get_rdma_devices(present_in: Path = INFINIBAND) -> list[str]:
    """The devices to use on this host: those of `PS_P2P_STORE_RDMA_DEVICES`, else those that `NCCL_IB_HCA` selects.

    If neither is set, or none is selected: all devices of the host.
    """
    if chosen := [name for item in envs.ps_p2p_store_rdma_devices().split(",") if (name := item.strip())]:
        return chosen
    available = list_ib_devices(present_in)
    selected = parse_nccl_ib_hca(envs.nccl_ib_hca(), available)
    if available and not selected:
        logger.warning("NCCL_IB_HCA=%s selects no RDMA device; using all", envs.nccl_ib_hca())
    return selected or parse_nccl_ib_hca("", available)


def get_my_rdma_device(local_rank: int, device_count: int, devices: Sequence[str]) -> str:
    """The device of `local_rank`, one of `device_count` ranks on this host. Contiguous blocks of ranks share a device.

    Raises RuntimeError if there is no device, ValueError if ranks cannot be divided evenly among `devices`.
    """
    if not devices:
        raise RuntimeError("no RDMA device on this host: use TCP, or set PS_P2P_STORE_RDMA_DEVICES to existing devices")
    if not 0 <= local_rank < device_count:
        raise ValueError(f"local rank {local_rank} is not one of {device_count} ranks on this host")
    if len(devices) > device_count or device_count % len(devices):
        what = "more RDMA devices than local ranks" if len(devices) > device_count else "local ranks do not divide"
        raise ValueError(
            f"{what}: {len(devices)} devices ({', '.join(devices)}) for {device_count} ranks. Set "
            f"PS_P2P_STORE_RDMA_DEVICES (or NCCL_IB_HCA) to a number of devices that divides {device_count}"
        )
    return devices[local_rank // (device_count // len(devices))]


def far_ports(gpu: Path, device_count: int, present_in: Path = INFINIBAND) -> list[str]:
    """The ports (`mlx5_0:1`) of all RDMA devices but the nearest to the GPU: of those of `get_rdma_devices` whose
    active ports are fastest. Empty if there is none, all of these are equally near, or they are more than the
    `device_count` ranks of this host, each of which may then use several."""
    present = list_ib_devices(present_in)
    rates = {name: _rate(present_in / name) for name in get_rdma_devices(present_in) if name in present}
    fastest = max(rates.values(), default=0.0)
    places = {name: present_in / name / "device" for name, rate in rates.items() if rate and rate == fastest}
    near = nearest(gpu, places)
    if len(near) == len(places) or len(places) > device_count:
        return []
    far = [name for name in present if name not in near]
    return [f"{name}:{port.name}" for name in far for port in sorted((present_in / name / "ports").glob("*"))]


def _rate(device: Path) -> float:
    """Gbit/s of the fastest active port of an RDMA device; 0 without one."""
    rates = [0.0]
    for port in (device / "ports").glob("*"):
        try:
            if "ACTIVE" in (port / "state").read_text("utf-8"):
                rates.append(float((port / "rate").read_text("utf-8").split()[0]))
        except (OSError, ValueError, IndexError):
            continue
    return max(rates)


def require_devices(wanted: Sequence[str], present: Sequence[str], backend: str, option: str) -> None:
    """Raises ConfigError if a device of `wanted` is not `present`, or the host has none. `option` sets the protocol."""
    if (missing := [name for name in wanted if name not in present]) or not present:
        raise ConfigError(
            f"checkpoint_engine.engine_kwargs.{backend}: no RDMA device {', '.join(missing) or 'at all'} on "
            f"{socket.gethostname()}; there are: {', '.join(present) or 'none'}. Use {option}=tcp without RDMA hardware"
        )


def choose_wire(
    protocol: str | None, local_rank: int, device_count: int, present_in: Path = INFINIBAND
) -> tuple[str, str]:
    """(protocol, RDMA device of `local_rank`) for a P2P store; `("tcp", "")` without RDMA.

    `protocol`: `tcp`, `rdma`, or None for RDMA if the host has devices. Raises ConfigError with the remedy.
    """
    if protocol not in (None, "tcp", "rdma"):
        raise ConfigError(f"the P2P store's protocol must be tcp or rdma, not {protocol!r}")
    if protocol == "tcp" or (protocol is None and not list_ib_devices(present_in)):
        return "tcp", ""
    try:
        return "rdma", get_my_rdma_device(local_rank, device_count, get_rdma_devices(present_in))
    except (RuntimeError, ValueError) as exc:
        raise ConfigError(str(exc)) from exc


def _by_number(name: str) -> list[tuple[str, int]]:
    return [(text, int(digits or -1)) for text, digits in re.findall(r"(\D*)(\d*)", name)]
