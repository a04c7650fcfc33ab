"""The options of `verl-sync plan`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from verl.planning.job import Job
from verl.planning.simulation import Workload


@dataclass(frozen=True, kw_only=True)
class Request:
    path: Path
    job: Job
    backends: tuple[str, ...]
    topology: str | None
    """None for each topology of a backend."""
    rdma: bool
    device: str
    device_nbytes: int | None
    host_nbytes: int | None
    hardware_path: Path | None
    cores: int
    workload: Workload | None
    """The workload to simulate."""
    as_json: bool
    picture: Path | None
