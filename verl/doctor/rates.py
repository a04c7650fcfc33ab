"""Measures the rates of copies and digests on this host, and of copies to and from its device."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable
from statistics import median

import numpy as np
import torch
import xxhash

from verl.checkpoint_engine.memory.host_memory import pinned_memory
from verl.doctor.finding import Finding

NBYTES = 2**27
REPEATS = 5
LEAST_GB_PER_S = {"memcpy": 2.0, "digest": 2.0, "device to host": 8.0, "host to device": 8.0}
"""Lower rates delay a sync. The latter two are about a third of PCIe 4 with 16 lanes."""
REMEDIES = {
    "memcpy": "other work shares this host's memory, or the container has too few cores",
    "digest": "other work shares this host's cores, or the container has too few of them",
    "device to host": "look at the device's PCIe link: nvidia-smi -q shows its width and generation",
    "host to device": "look at the device's PCIe link: nvidia-smi -q shows its width and generation",
}


def rate_findings() -> list[Finding]:
    source, target = np.ones(NBYTES, np.uint8), np.zeros(NBYTES, np.uint8)
    found = {
        "memcpy": _gb_per_s(lambda: np.copyto(target, source)),
        "digest": _gb_per_s(lambda: xxhash.xxh3_64_intdigest(source.data)),
    }
    if torch.cuda.is_available():
        on_device, pinned = torch.zeros(NBYTES, dtype=torch.uint8, device="cuda"), pinned_memory(NBYTES)
        found["device to host"] = _gb_per_s(lambda: pinned.copy_(on_device))
        found["host to device"] = _gb_per_s(lambda: on_device.copy_(pinned))
    return [_finding(check, rate) for check, rate in found.items()]


def _finding(check: str, rate: float) -> Finding:
    slow = rate < LEAST_GB_PER_S[check]
    return Finding(
        check=check,
        where=socket.gethostname(),
        state="slow" if slow else "ok",
        found=f"{rate:.1f} GB/s, one thread",
        remedy=f"{REMEDIES[check]} (expected: {LEAST_GB_PER_S[check]:g} or more)" if slow else "",
        value=rate,
    )


def _gb_per_s(action: Callable[[], object]) -> float:
    seconds = []
    for _ in range(REPEATS + 1):
        start_s = time.perf_counter()
        action()
        seconds.append(time.perf_counter() - start_s)
    return NBYTES / median(seconds[1:]) / 1e9
