"""Traces of a trainer rank: for chrome://tracing or Perfetto, for Nsight Systems, or of a device's memory."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import torch
from torch.profiler import ProfilerActivity, profile

from verl.checkpoint_engine.compat.torch import dump_memory, record_memory


class _Running(Protocol):
    def stop(self) -> None: ...

    def export_chrome_trace(self, path: str) -> None: ...


class RankProfiler:
    """Traces one rank. Used on the rank's own thread, which it traces together with autograd's."""

    def __init__(self, device: str) -> None:
        self._device = device
        self._stop: Callable[[Path], None] | None = None

    def start(self, tool: str) -> None:
        """Begin a trace. `tool`: as in `global_profiler.tool`, one that traces this rank's device."""
        if tool == "nsys":  # this process runs under it, and it waits for this
            torch.cuda.profiler.start()  # type: ignore[no-untyped-call]
            self._stop = lambda _: torch.cuda.profiler.stop()  # type: ignore[no-untyped-call]
        elif tool == "torch_memory":
            record_memory(on=True)
            self._stop = _dump_memory
        else:
            running = _npu_profile() if tool == "npu" else _torch_profile(self._device)
            running.start()
            self._stop = lambda path: _export(running, path)

    def stop(self, path: Path) -> None:
        """Write the trace to `path` plus the suffix of its kind; makes the directory if needed.

        Does nothing without `start`. A process under nsys writes to nsys's own output.
        """
        stop, self._stop = self._stop, None
        if stop is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
            stop(path)


def _torch_profile(device: str) -> profile:
    return profile(activities=[ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * (device == "cuda"))


def _npu_profile() -> Any:
    import torch_npu  # its devices alone have it

    activity = torch_npu.profiler.ProfilerActivity
    return torch_npu.profiler.profile(activities=[activity.CPU, activity.NPU])


def _export(running: _Running, path: Path) -> None:
    running.stop()
    running.export_chrome_trace(f"{path}.json.gz")


def _dump_memory(path: Path) -> None:
    dump_memory(f"{path}.pickle")
    record_memory(on=False)
