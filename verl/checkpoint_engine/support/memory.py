"""Measure the memory of processes, and its peak in each phase of their work. Linux; no torch.

with memory_watch().during("update_actor"):
    ...
memory_watch().uses()
"""

from __future__ import annotations

import contextlib
import os
import re
import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, ClassVar

import psutil

_KIB = re.compile(r"^(VmHWM|VmRSS|RssShmem):\s+(\d+) kB", re.MULTILINE)
RESET_PEAK = "5"
"""Written to /proc/self/clear_refs, it resets Linux's peak."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryUse:
    """Bytes that a process, or a tree of processes, holds. Peaks are those of `phase`, or since the process began."""

    process: str
    """Its name: `driver`, `trainer-3`, `node-0`, `replica-1`."""
    phase: str = ""
    host_nbytes: int = 0
    """Resident memory, with the touched pages of shared memory such as an arena."""
    host_peak_nbytes: int = 0
    shared_nbytes: int = 0
    """The part of `host_nbytes` in shared memory."""
    device_nbytes: int = 0
    """Memory of the accelerator: torch's allocations; of a tree of processes, the count of the device's driver."""
    device_peak_nbytes: int = 0

    NUMBERS: ClassVar[tuple[str, ...]] = (
        *("host_nbytes", "host_peak_nbytes", "shared_nbytes", "device_nbytes", "device_peak_nbytes"),
    )

    @property
    def numbers(self) -> tuple[int, ...]:
        return tuple(getattr(self, name) for name in self.NUMBERS)

    def with_numbers(self, numbers: Iterable[int]) -> MemoryUse:
        """A copy with these values, in the order of NUMBERS."""
        changes: dict[str, Any] = dict(zip(self.NUMBERS, numbers, strict=True))
        return replace(self, **changes)

    def metrics(self, role: str) -> dict[str, float]:
        """The values in GB, as `memory/<role>/...`, without those of the device if its peak is 0."""
        prefix = f"memory/{role}/{self.phase}/" if self.phase else f"memory/{role}/"
        scalars = {"host_gb": self.host_nbytes, "host_peak_gb": self.host_peak_nbytes}
        if self.shared_nbytes:
            scalars["shared_gb"] = self.shared_nbytes
        if self.device_peak_nbytes:
            scalars |= {"device_gb": self.device_nbytes, "device_peak_gb": self.device_peak_nbytes}
        return {prefix + name: value / 1e9 for name, value in scalars.items()}


def most(uses: Iterable[MemoryUse]) -> MemoryUse | None:
    """The maximum of each value over processes of one role and phase, named after the process with the highest peak."""
    known = sorted(uses, key=lambda use: -use.host_peak_nbytes - use.device_peak_nbytes)
    if not known:
        return None
    return known[0].with_numbers(map(max, zip(*(use.numbers for use in known), strict=True)))


def resident(pid: int | str = "self") -> Mapping[str, int]:
    """Bytes by the kernel's names: VmRSS, VmHWM (the peak) and RssShmem. Empty if the process is gone."""
    try:
        text = Path(f"/proc/{pid}/status").read_text("utf-8")
    except OSError:
        return {}
    return {name: int(kib) * 1024 for name, kib in _KIB.findall(text)}


def tree_use(process: str) -> MemoryUse:
    """The memory of this process and its descendants. Shared memory counts once: the largest share of one process. The
    peak is the sum of all peaks, which may be of different moments. Device memory is the current one."""
    pids = [os.getpid(), *(child.pid for child in psutil.Process().children(recursive=True))]
    found = [held for held in map(resident, pids) if held]
    on_devices = cuda_nbytes_of(pids)
    shared = [held.get("RssShmem", 0) for held in found]
    twice = sum(shared) - max(shared, default=0)
    return MemoryUse(
        process=process,
        host_nbytes=sum(held.get("VmRSS", 0) for held in found) - twice,
        host_peak_nbytes=sum(held.get("VmHWM", 0) for held in found) - twice,
        shared_nbytes=max(shared, default=0),
        device_nbytes=on_devices,
        device_peak_nbytes=on_devices,
    )


def cuda_nbytes_of(pids: Collection[int]) -> int:
    """Bytes of the processes on all CUDA devices of this host by NVML, contexts and caches included.

    0 without NVML (`nvidia-ml-py`, which CUDA engines install) or a device, and in containers in which NVML reports
    other process ids.
    """
    try:
        import pynvml
    except ImportError:
        return 0
    try:
        pynvml.nvmlInit()
        try:
            handles = [pynvml.nvmlDeviceGetHandleByIndex(index) for index in range(pynvml.nvmlDeviceGetCount())]
            held = [process for handle in handles for process in pynvml.nvmlDeviceGetComputeRunningProcesses(handle)]
        finally:
            pynvml.nvmlShutdown()
    except pynvml.NVMLError:
        return 0
    return sum(process.usedGpuMemory or 0 for process in held if process.pid in pids)


DeviceMemory = Callable[[], tuple[int, int]]
"""Returns the bytes that torch holds on the device now, and their peak since the last call."""


class MemoryWatch:
    """The peaks of one process, in phases that may overlap. Thread-safe.

    The kernel has one peak per process. When a phase begins or ends, all open phases record it, and it is reset. If the
    kernel does not allow a reset, peaks are those since the process began.
    """

    def __init__(
        self, held: Callable[[], Mapping[str, int]] = resident, reset: Callable[[], None] | None = None
    ) -> None:
        self.device: DeviceMemory | None = None
        """Set by code that computes on a device."""
        self._held, self._reset = held, reset or _begin_new_peak
        self._lock = threading.Lock()
        self._open: dict[str, MemoryUse] = {}
        self._ended: dict[str, MemoryUse] = {}
        self._since_start = MemoryUse(process="")

    @contextmanager
    def during(self, phase: str) -> Iterator[None]:
        """Record the peak of this block, even if it raises."""
        with self._lock:
            self._look()
            self._open[phase] = replace(self._now(), phase=phase)
        try:
            yield
        finally:
            with self._lock:
                self._look()
                if phase in self._open:  # another block of this name may have ended it
                    self._ended[phase] = self._open.pop(phase)

    def use_of(self, process: str, phase: str) -> MemoryUse:
        """The use of the last block `phase`, under the name `process`."""
        with self._lock:
            return replace(self._ended.get(phase, MemoryUse(process="", phase=phase)), process=process)

    def since_start(self, process: str) -> MemoryUse:
        with self._lock:
            self._look()
            return replace(self._since_start, process=process)

    def _now(self) -> MemoryUse:
        held = self._held()
        device = self.device() if self.device is not None else (0, 0)
        return MemoryUse(
            process="",
            host_nbytes=held.get("VmRSS", 0),
            host_peak_nbytes=held.get("VmHWM", 0),
            shared_nbytes=held.get("RssShmem", 0),
            device_nbytes=device[0],
            device_peak_nbytes=device[1],
        )

    def _look(self) -> None:
        now = self._now()
        self._reset()
        self._since_start = _with_peaks(now, self._since_start)
        self._open = {phase: replace(_with_peaks(now, before), phase=phase) for phase, before in self._open.items()}


def in_words(nbytes: int) -> str:
    """A size for people, in GiB or MiB."""
    return f"{nbytes / 2**30:.2f} GiB" if nbytes >= 2**30 else f"{nbytes / 2**20:.1f} MiB"


def free_nbytes(directory: Path) -> int:
    """The free bytes of the file system of `directory`, for this user."""
    stats = os.statvfs(directory)
    return stats.f_bavail * stats.f_frsize


def _with_peaks(now: MemoryUse, before: MemoryUse) -> MemoryUse:
    return replace(
        now,
        host_peak_nbytes=max(now.host_peak_nbytes, before.host_peak_nbytes),
        device_peak_nbytes=max(now.device_peak_nbytes, before.device_peak_nbytes),
    )


def _begin_new_peak() -> None:
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text(RESET_PEAK, "utf-8")


@cache
def memory_watch() -> MemoryWatch:
    """The MemoryWatch of this process."""
    return MemoryWatch()
