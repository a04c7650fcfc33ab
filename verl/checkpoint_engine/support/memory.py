"""How much memory processes hold, and the most that each phase of their work took. Linux; no torch.

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
"""What Linux takes in /proc/self/clear_refs to begin a new peak."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryUse:
    """Bytes that a process, or a tree of processes, holds; peaks are those of `phase`, or else since it began."""

    process: str
    """`driver`, `trainer-3`, `node-0`, `replica-1`."""
    phase: str = ""
    host_nbytes: int = 0
    """Resident, with what it has touched of memory that it shares, such as an arena."""
    host_peak_nbytes: int = 0
    shared_nbytes: int = 0
    """Of `host_nbytes`: in shared memory."""
    device_nbytes: int = 0
    """On the accelerator: allocated by torch; of a tree of processes, all that the driver of the device counts."""
    device_peak_nbytes: int = 0

    NUMBERS: ClassVar[tuple[str, ...]] = (
        *("host_nbytes", "host_peak_nbytes", "shared_nbytes", "device_nbytes", "device_peak_nbytes"),
    )

    @property
    def numbers(self) -> tuple[int, ...]:
        return tuple(getattr(self, name) for name in self.NUMBERS)

    def with_numbers(self, numbers: Iterable[int]) -> MemoryUse:
        """`numbers` are in the order of NUMBERS."""
        changes: dict[str, Any] = dict(zip(self.NUMBERS, numbers, strict=True))
        return replace(self, **changes)

    def metrics(self, role: str) -> dict[str, float]:
        """In GB, as `memory/<role>/...`; zero on a device is left out: there is none."""
        prefix = f"memory/{role}/{self.phase}/" if self.phase else f"memory/{role}/"
        scalars = {"host_gb": self.host_nbytes, "host_peak_gb": self.host_peak_nbytes}
        if self.shared_nbytes:
            scalars["shared_gb"] = self.shared_nbytes
        if self.device_peak_nbytes:
            scalars |= {"device_gb": self.device_nbytes, "device_peak_gb": self.device_peak_nbytes}
        return {prefix + name: value / 1e9 for name, value in scalars.items()}


def most(uses: Iterable[MemoryUse]) -> MemoryUse | None:
    """The largest number of each kind, over processes of one role and phase; named after the one with the highest
    peak."""
    known = sorted(uses, key=lambda use: -use.host_peak_nbytes - use.device_peak_nbytes)
    if not known:
        return None
    return known[0].with_numbers(map(max, zip(*(use.numbers for use in known), strict=True)))


def resident(pid: int | str = "self") -> Mapping[str, int]:
    """Bytes by the kernel's names: VmRSS, VmHWM (its peak) and RssShmem. Empty if the process is gone."""
    try:
        text = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return {}
    return {name: int(kib) * 1024 for name, kib in _KIB.findall(text)}


def tree_use(process: str) -> MemoryUse:
    """This process and all below it. Memory that several of them share counts once, as much as the largest holds; the
    peak is the sum of their peaks, which may be of different moments. On a device it is what they hold now."""
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
    """What the processes hold on all CUDA devices of this host, as NVML counts it: with contexts and caches.

    0 where there is no NVML (`nvidia-ml-py`, which CUDA engines bring), no device, or where a container keeps NVML from
    seeing processes by the numbers that they have here.
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
"""Bytes that torch holds on the device now, and its most since the last call."""


class MemoryWatch:
    """The peaks of one process, in phases that may overlap. Thread-safe.

    The kernel keeps one peak for a process. Whenever a phase begins or ends, all open ones learn it, and a new one
    begins. Where that is not allowed, peaks are those since the process began.
    """

    def __init__(
        self, held: Callable[[], Mapping[str, int]] = resident, reset: Callable[[], None] | None = None
    ) -> None:
        self.device: DeviceMemory | None = None
        """Set by whoever computes on one."""
        self._held, self._reset = held, reset or _begin_new_peak
        self._lock = threading.Lock()
        self._open: dict[str, MemoryUse] = {}
        self._ended: dict[str, MemoryUse] = {}
        self._since_start = MemoryUse(process="")

    @contextmanager
    def during(self, phase: str) -> Iterator[None]:
        """The block, also when it raises."""
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
        """Of the last block of that name, as that of `process`."""
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


def _with_peaks(now: MemoryUse, before: MemoryUse) -> MemoryUse:
    return replace(
        now,
        host_peak_nbytes=max(now.host_peak_nbytes, before.host_peak_nbytes),
        device_peak_nbytes=max(now.device_peak_nbytes, before.device_peak_nbytes),
    )


def _begin_new_peak() -> None:
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text(RESET_PEAK)


@cache
def memory_watch() -> MemoryWatch:
    """That of this process."""
    return MemoryWatch()
