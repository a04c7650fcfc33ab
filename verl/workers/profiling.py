"""Traces of what a trainer rank does: torch's profiler, for chrome://tracing or Perfetto."""

from __future__ import annotations

from pathlib import Path

from torch.profiler import ProfilerActivity, profile


class RankProfiler:
    """Used on the rank's own thread, which is the one that is traced, with autograd's behind it."""

    def __init__(self, device: str) -> None:
        self._activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * (device == "cuda")
        self._running: profile | None = None

    def start(self) -> None:
        self._running = profile(activities=self._activities)
        self._running.start()

    def stop(self, path: Path) -> None:
        """Write the trace to `path`, whose directory is made if need be. Without `start` nothing happens."""
        running, self._running = self._running, None
        if running is None:
            return
        running.stop()
        path.parent.mkdir(parents=True, exist_ok=True)
        running.export_chrome_trace(str(path))
