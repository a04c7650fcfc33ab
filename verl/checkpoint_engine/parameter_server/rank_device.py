"""The device that one rank of a ParameterServer feeds: its name, and how much memory of it buckets may take."""

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
"""Most in one bucket unless PS_MAX_BUCKET_SIZE_GB says otherwise. Host memory gains nothing from larger ones."""


@dataclass(frozen=True, kw_only=True)
class Device:
    torch_device: torch.device
    id: str
    """Under which an engine on this host knows it, too; on CPU `cpu-<rank>`."""
    count: int
    """Ranks per host."""
    local_rank: int

    @classmethod
    def of(cls, rank: int, world_size: int, gpu_count: int | None) -> Device:
        """The device of `rank`. Raises ConfigError unless `gpu_count` is between 1 and what this host has."""
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
        """Memory for buckets. On CPU the ranks of a host share what it has."""
        if self.kind == "cpu":
            return free_host_nbytes() // self.count
        module: Any = torch.get_device_module(self.kind)
        module.empty_cache()
        free: int = module.mem_get_info(self.torch_device)[0]
        return free

    def max_bucket_nbytes(self, largest: int) -> int:
        """As configured; else a default, which gives way to a tensor of `largest` bytes. Raises ConfigError."""
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
        """For the calling thread: torch starts every one with the first device."""
        if self.kind != "cpu":
            torch.get_device_module(self.kind).set_device(self.torch_device)

    def synchronize(self) -> None:
        """Wait until what the calling thread has copied to or from the device is there."""
        if self.kind != "cpu":
            torch.get_device_module(self.kind).current_stream(self.torch_device).synchronize()
