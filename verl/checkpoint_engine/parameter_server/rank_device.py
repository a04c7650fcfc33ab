"""The device that one rank of a ParameterServer feeds: its id, and its memory for buckets."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from ..errors import ConfigError
from ..memory.host_memory import free_host_nbytes
from ..support import envs
from ..support.device import local_device, resolve_device
from .devices import device_id

CPU_BUCKET_NBYTES = 2**28
DEVICE_BUCKET_NBYTES = 2**33
"""The most bytes of a bucket on devices, CPU_BUCKET_NBYTES on CPU, unless PS_MAX_BUCKET_SIZE_GB is set."""


@dataclass(frozen=True, kw_only=True)
class Device:
    torch_device: torch.device
    id: str
    """The id that engines on this host use, too; on CPU `cpu-<rank>`."""
    count: int
    """Number of ranks per host."""
    local_rank: int

    @classmethod
    def of(cls, rank: int, world_size: int, gpu_count: int | None) -> Device:
        """The device of `rank`. Raises ConfigError unless `gpu_count` is from 1 to this host's number of devices."""
        kind = resolve_device()
        module: Any = None if kind == "cpu" else torch.get_device_module(kind)
        # A CPU has no devices to count: any rank may drive it.
        present = world_size if module is None else module.device_count()
        count = gpu_count if gpu_count is not None else min(envs.local_world_size() or present, present)
        if not 1 <= count <= present:
            what = "ranks" if module is None else f"{kind} devices on this host"
            raise ConfigError(f"gpu_count must be between 1 and {present}, the number of {what}, not {count}")
        device = local_device(kind, rank % count)
        return cls(torch_device=device, id=device_id(device, rank), count=count, local_rank=rank % count)

    @property
    def kind(self) -> str:
        return self.torch_device.type

    def free_nbytes(self) -> int:
        """Free bytes for buckets. On CPU the ranks of a host share its free memory."""
        if self.kind == "cpu":
            return free_host_nbytes() // self.count
        module: Any = torch.get_device_module(self.kind)
        module.empty_cache()
        free: int = module.mem_get_info(self.torch_device)[0]
        return free

    def max_bucket_nbytes(self, largest: int) -> int:
        """The configured limit, or the default, which is at least `largest` bytes. Raises ConfigError."""
        try:
            gib = envs.ps_max_bucket_size_gb()
        except ValueError as exc:
            raise ConfigError(str(exc)) from exc
        if gib is None:
            return max(CPU_BUCKET_NBYTES if self.kind == "cpu" else DEVICE_BUCKET_NBYTES, largest)
        if not gib > 0:
            raise ConfigError(f"PS_MAX_BUCKET_SIZE_GB must be positive, not {gib}")
        return int(gib * 2**30)

    def make_current(self) -> None:
        """Make it current for the calling thread: torch starts every thread with the first device."""
        if self.kind != "cpu":
            torch.get_device_module(self.kind).set_device(self.torch_device)

    def synchronize(self) -> None:
        """Wait for the calling thread's copies to and from the device."""
        if self.kind != "cpu":
            torch.get_device_module(self.kind).current_stream(self.torch_device).synchronize()
