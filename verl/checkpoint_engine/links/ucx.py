"""UCX, the library below NIXL: its options for transports and devices, and its errors if it cannot use them.

UCX reads options only from the environment, so they are set there while a context is created. The user's variables have
precedence (https://openucx.readthedocs.io/en/master/faq.html).
"""

from __future__ import annotations

import logging
import os
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from .rdma import INFINIBAND, far_ports

logger = logging.getLogger(__name__)

TLS, NET_DEVICES = "UCX_TLS", "UCX_NET_DEVICES"
PROBE_TIMEOUT_S = 60.0
_PROBE = """
import sys
import nixl
options = nixl.nixlAgentConfig()
options.useProgThread = False
nixl.nixlAgent("probe", options).createBackend("UCX", {"ucx_error_handling_mode": sys.argv[1]})
"""
_COMPLAINT = re.compile(r"UCX\s+(?:WARN|ERROR)\s+(.*)")
_changing = threading.Lock()


@contextmanager
def environment(tls: str | None, net_devices: str | None) -> Iterator[None]:
    """In this block, UCX contexts use the transports `tls` and the devices `net_devices`. None: UCX chooses."""
    with _changing:
        added = _additions(tls, net_devices, log_level="fatal")
        os.environ.update(added)
        try:
            yield
        finally:
            for name in added:
                del os.environ[name]


def _additions(tls: str | None, net_devices: str | None, *, log_level: str) -> dict[str, str]:
    """What the environment lacks. Without EFA hardware UCX's EFA module crashes the process at exit (nixl 1.5.1)."""
    wanted = {"UCX_LOG_LEVEL": log_level, "UCX_WARN_UNUSED_ENV_VARS": "n"}
    if not any(path.name.startswith("efa") for path in INFINIBAND.glob("*")):
        wanted["UCX_MODULES"] = "^efa"
    if tls is not None:
        wanted[TLS] = tls
    if net_devices is not None:
        wanted[NET_DEVICES] = net_devices
    return {name: value for name, value in wanted.items() if name not in os.environ}


def asked_for(tls: str | None, net_devices: str | None) -> dict[str, str]:
    """The variables UCX_TLS and UCX_NET_DEVICES: values of the environment, else of the options."""
    options = {TLS: tls, NET_DEVICES: net_devices}
    chosen = {name: os.environ.get(name, option) for name, option in options.items()}
    return {name: value for name, value in chosen.items() if value is not None}


def near_devices(member: str, gpu: Path | None, device_count: int, present_in: Path = INFINIBAND) -> str | None:
    """The option `net_devices` of a member beside `gpu`: all devices but `far_ports`. None, UCX's default, without
    a GPU, without such ports, or if the environment names devices. `device_count`: ranks of this host.

    For host memory UCX does not look at the GPU, so that ranks of a host may use the same devices.
    """
    far = far_ports(gpu, device_count, present_in) if gpu is not None and NET_DEVICES not in os.environ else []
    if gpu is None or not far:
        return None
    chosen = f"^{','.join(far)}"
    logger.info("%s is read over the RDMA devices near its GPU %s: %s=%s", member, gpu.name, NET_DEVICES, chosen)
    return chosen


def complaints(tls: str | None, net_devices: str | None, error_handling: str) -> list[str]:
    """UCX's errors on this host for these options: if it cannot start with them, or lacks one of the devices.

    UCX is started in a process of its own, because it logs to the output of its process.
    """
    with _changing:
        variables = {**os.environ, **_additions(tls, net_devices, log_level="warn")}
    command = [sys.executable, "-c", _PROBE, error_handling]
    try:
        done = subprocess.run(
            command, env=variables, capture_output=True, text=True, timeout=PROBE_TIMEOUT_S, check=False
        )
    except subprocess.TimeoutExpired:
        return [f"it has not started within {PROBE_TIMEOUT_S:.0f} s"]
    said = _COMPLAINT.findall(done.stdout + done.stderr)
    missing = [line for line in said if "is not available" in line]
    if done.returncode == 0:  # transports may be alternatives; devices are meant
        return [line for line in missing if line.startswith("network device")]
    return missing or said or [f"it does not start: {(done.stderr or done.stdout).strip()[-500:]}"]
