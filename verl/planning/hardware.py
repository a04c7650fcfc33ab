"""The rates of a plan's hosts: measured by `verl-sync doctor --json`, else assumed between two bounds."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from verl.planning.cost import Rates
from verl.utils.config import ConfigError

ENDLESS = float("inf")


@dataclass(frozen=True, kw_only=True)
class Assumed:
    """A rate that was not measured on the hosts, assumed between `slow` and `fast`."""

    slow: float
    fast: float
    source: str


ASSUMED = {
    "copy": Assumed(slow=2.5e9, fast=6e9, source="benchmarks/deltas.md: 3.4 to 3.8 GB/s; a server's core has more"),
    "digest": Assumed(slow=4e9, fast=12e9, source="doctor.md: 7.6 GB/s, benchmarks/hosts.md: 6"),
    "encode": Assumed(slow=1.2e9, fast=3e9, source="benchmarks/deltas.md: 1.5 to 2.7 GB/s"),
    "apply": Assumed(slow=1.2e9, fast=3e9, source="benchmarks/deltas.md: 1.5 to 3.2 GB/s"),
    "to_host": Assumed(slow=20e9, fast=54e9, source="benchmarks/device.md: 49 to 54 GB/s; PCIe 4 has half"),
    "load": Assumed(slow=5.7e9, fast=50e9, source="benchmarks/device.md: 5.7 (slot not mapped) to 51 GB/s"),
    "message_s": Assumed(slow=3e-4, fast=5e-5, source="links/cuts.py: some hundred microseconds"),
    "tensor_s": Assumed(slow=1e-4, fast=1e-5, source="not measured"),
    "call_s": Assumed(slow=2e-2, fast=2e-3, source="benchmarks/hosts.md: 0.01 s beside the phases"),
    "member_s": Assumed(slow=1e-3, fast=1e-4, source="not measured with hundreds of members"),
}
WIRE_SHARE = {
    "sockets": Assumed(slow=0.80, fast=0.96, source="benchmarks/hosts.md: 0.96 of 1 Gbit/s"),
    "rdma": Assumed(slow=0.70, fast=0.92, source="published: 0.88 of 400 Gbit/s"),
    "nccl": Assumed(slow=0.60, fast=0.90, source="not measured"),
}
PROCESS = {
    "sockets": Assumed(slow=1.5e9, fast=5e9, source="benchmarks/weight_sync.md: 3.3 to 4 GB/s on one host"),
    "rdma": Assumed(slow=20e9, fast=ENDLESS, source="a NIC of 400 Gbit/s at the least"),
    "nccl": Assumed(slow=20e9, fast=ENDLESS, source="a NIC of 400 Gbit/s at the least"),
}
MEASURED = {"memcpy": "copy", "digest": "digest", "device to host": "to_host", "host to device": "load"}
"""Findings of the doctor, in GB/s, and the rate that each bounds."""
COPIED_AND_DIGESTED = 0.8
"""The rate of copying with a digest of cached bytes is at least this fraction of a copy's: benchmarks/deltas.md."""
MARGIN = 0.15
"""The relative margin around measured rates."""


@dataclass(frozen=True, kw_only=True)
class Hardware:
    """The known rates and memory of the hosts."""

    measured: dict[str, tuple[float, float]]
    """By rate: the values of the slowest and the fastest host."""
    host_nbytes: int | None = None
    shared_nbytes: int | None = None
    threads: int = 4

    def rates(self, wire: str, *, device: bool = True) -> tuple[Rates, Rates]:
        """(slow, fast) rates. With `device`, trainers hold weights on accelerators, and engines compute there."""
        known = ASSUMED | {"wire_share": WIRE_SHARE[wire], "process": PROCESS[wire]}
        pair = [{name: getattr(one, side) for name, one in known.items()} for side in ("slow", "fast")]
        for name, (low, high) in self.measured.items():
            pair[0][name], pair[1][name] = low * (1 - MARGIN), high * (1 + MARGIN)
        if not device:
            for values in pair:
                values["to_host"] = ENDLESS
        slow, fast = (Rates(**values, threads=self.threads) for values in pair)
        return slow, fast

    @property
    def assumed(self) -> tuple[str, ...]:
        """Rates that were not measured."""
        return tuple(field.name for field in fields(Rates) if field.name not in (*self.measured, "threads"))


UNKNOWN = Hardware(measured={})


def read_hardware(path: Path) -> Hardware:
    """The hardware in a file of `verl-sync doctor --json`. Raises ConfigError."""
    try:
        document = json.loads(path.read_text("utf-8"))
        findings = [(one["check"], float(one["value"])) for one in document["findings"] if one["value"] is not None]
    except (OSError, ValueError, KeyError, TypeError) as exc:
        raise ConfigError(f"--hardware {path} is not what `verl-sync doctor --json` writes: {exc}") from exc
    measured = {}
    for check, rate in MEASURED.items():
        if values := [value * 1e9 for found, value in findings if found == check and value > 0]:
            measured[rate] = (min(values), max(values))
    if "copy" in measured:
        measured["copy"] = (measured["copy"][0] * COPIED_AND_DIGESTED, measured["copy"][1])
    return Hardware(
        measured=measured,
        host_nbytes=_least(findings, "memory"),
        shared_nbytes=_least(findings, "shared memory"),
    )


def _least(findings: Iterable[tuple[str, float]], check: str) -> int | None:
    values = [value for found, value in findings if found == check]
    return int(min(values) * 2**30) if values else None


def faster(rates: Rates, name: str, times: float) -> Rates:
    """`rates` with one of them `times` as good."""
    value = getattr(rates, name)
    changed: dict[str, Any] = {name: value / times if name.endswith("_s") else value * times}
    return replace(rates, **changed)
